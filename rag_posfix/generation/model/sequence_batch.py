"""Batches of sequences with their KV cache, and forward passes over them. The only caller of a model.

The KV cache: buffers with spare capacity at the end, so that a new token costs its own copy and no more.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from rag_posfix.errors import GenerationError
from rag_posfix.generation.model.batch_invariance import ALL_ROWS, PassRows, blocks_of
from rag_posfix.patching.attention_hook import (
    BatchSlice,
    ForwardContext,
    LastLayerRead,
    LayerState,
    Observer,
    Overrides,
    active,
)
from rag_posfix.patching.snapshots import SnapshotForm
from rag_posfix.patching.spec import KeptKeys, ModelSpec, PlainCache
from rag_posfix.patching.structure import main_device
from rag_posfix.plan.plan import Capability

SPARE_TOKENS = 64
"""Minimum spare capacity of a buffer, in tokens."""

GROWTH = 8
"""A full buffer grows by 1 / GROWTH of its length: on average each token is copied at most GROWTH times."""


class GrowingLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of ``GrowingCache``. ``keys`` and ``values`` are views of what is filled: (R, Hkv, T, D)."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append tokens and return all: views of the buffers, which stay valid until the next update."""
        stop = self.length + key_states.shape[2]
        self._reserve(key_states, value_states, stop)
        if self._keys is None or self._values is None:  # _reserve made them
            raise RuntimeError("a cache layer has no buffers after it reserved them; please report this")
        self._keys[:, :, self.length : stop] = key_states
        self._values[:, :, self.length : stop] = value_states
        self.length = stop
        self.keys, self.values = self._keys[:, :, :stop], self._values[:, :, :stop]
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def fill(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Take buffers whose first ``length`` tokens are filled."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._keys, self._values, self.length = keys, values, length
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]

    def branch(self) -> GrowingLayer:
        """Return a layer on the same buffers that continues independently from here."""
        layer = GrowingLayer()
        if self._keys is not None and self._values is not None:
            layer.fill(self._keys, self._values, self.length)
        return layer

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1  # no bound

    def _reserve(self, key_states: Tensor, value_states: Tensor, length: int) -> None:
        if self._keys is not None and self._values is not None and length <= self._keys.shape[2]:
            return
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        capacity = length + max(SPARE_TOKENS, length // GROWTH)
        rows, heads, _, channels = key_states.shape
        keys = key_states.new_empty((rows, heads, capacity, channels))
        values = value_states.new_empty((rows, heads, capacity, value_states.shape[3]))
        if self._keys is not None and self._values is not None:
            keys[:, :, : self.length] = self._keys[:, :, : self.length]
            values[:, :, : self.length] = self._values[:, :, : self.length]
        self._keys, self._values = keys, values


class GrowingCache(Cache):  # type: ignore[misc]
    """The KV cache of a batch, for models that keep all keys in every layer."""

    def __init__(self, n_layers: int) -> None:
        super().__init__(layers=[GrowingLayer() for _ in range(n_layers)])

    def branch(self) -> GrowingCache:
        """Return a cache that continues independently from here, on the same buffers; nothing is copied.

        It is valid until this one, or another branch of it, is updated.
        """
        branched = GrowingCache(0)
        branched.layers = [layer.branch() for layer in self.layers if isinstance(layer, GrowingLayer)]
        return branched

    def copy(self, length: int, rows: Tensor | None = None) -> GrowingCache:
        """Return an independent cache that holds the first ``length`` tokens of all rows, or of some."""
        copied = GrowingCache(len(self.layers))
        for old, new in zip(self.layers, copied.layers, strict=True):
            keys, values = old.keys[:, :, :length], old.values[:, :, :length]
            new.update(*((keys, values) if rows is None else (keys[rows], values[rows])))
        return copied

    @staticmethod
    def over(buffers: Tensor, length: int) -> GrowingCache:
        """Return a cache on buffers whose first ``length`` tokens are filled.

        Shapes:
            buffers: (2, L, R, Hkv, capacity, D): keys and values of all layers.
        """
        cache = GrowingCache(buffers.shape[1])
        for layer, keys, values in zip(cache.layers, buffers[0], buffers[1], strict=True):
            layer.fill(keys, values, length)
        return cache


class ConcatenatedCache(Cache):  # type: ignore[misc]
    """The KV caches of several batches in one forward pass: each batch's new tokens go to its own cache.

    The attention hook reads the batches' own caches: ``update`` returns only the new tokens. Rows beyond the batches
    are padding, which no cache keeps.

    ``counts`` are the rows of each batch, then the rows of padding, if there are any.
    """

    def __init__(self, caches: Sequence[GrowingCache], counts: Sequence[int]) -> None:
        super().__init__(layers=[GrowingLayer()])  # empty: its length is the number of new tokens
        self._caches = list(caches)
        self._counts = list(counts)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append each batch's new tokens to its cache; return the new tokens."""
        keys, values = torch.split(key_states, self._counts), torch.split(value_states, self._counts)
        for cache, key, value in zip(self._caches, keys, values, strict=False):
            cache.layers[layer_idx].update(key, value)
        return key_states, value_states


def cache_bytes(caches: Sequence[Cache]) -> int:
    """Return the bytes of the buffers of KV caches; caches that share buffers count them once."""
    storages = {}
    for layer in (layer for cache in caches for layer in cache.layers):
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model and what patching learned of it.

    Attributes:
        pass_rows: In how many rows its decode passes are computed; see ``batch_invariance``.
        projector: Matrices of a reranker's head, (out, in) each, the first first; empty for other models.
    """

    model: Any
    spec: ModelSpec
    pass_rows: PassRows = ALL_ROWS
    projector: tuple[Tensor, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the weights are; the first of them, if they are on several devices."""
        return main_device(self.model)

    @property
    def keeps_all_keys(self) -> bool:
        """Whether every layer keeps the keys of all tokens: their caches can be cut, joined and branched."""
        return Capability.FULL_CACHE in self.spec.shape.capabilities

    @property
    def kept(self) -> KeptKeys | None:
        """What the layers of a model without the attention hook keep of each token, where that is all they keep."""
        return None if self.spec.unhooked is None else self.spec.unhooked.kept

    @property
    def snapshots(self) -> SnapshotForm | None:
        """How the whole cache of a model without the attention hook is stored, where its keys alone are not enough."""
        return None if self.spec.unhooked is None else self.spec.unhooked.snapshots

    @property
    def stores_keys(self) -> bool:
        """Whether a prompt can be continued from what the passage KV store keeps of its first tokens."""
        return self.keeps_all_keys or self.kept is not None or self.snapshots is not None

    @property
    def entry_sizes(self) -> tuple[int, int, int]:
        """Layers, heads and channels of an entry of the passage KV store."""
        shape = self.spec.shape
        return (shape.n_layers, shape.n_kv_heads, shape.head_dim) if self.kept is None else (1, 1, self.kept.width)

    def reading(self, n_positions: float) -> LoadedModel:
        """Return the model for calls of ``n_positions`` positions, answers included; see ``ModelSpec.extended``."""
        window, extended = self.spec.original_window, self.spec.extended
        return self if window is None or extended is None or n_positions <= window else replace(self, spec=extended)


@dataclass(slots=True, eq=False)
class SequenceBatch:
    """Sequences that are read and decoded together: a batch with its KV cache, its padding and its positions.

    Forward passes append to it. Nothing else changes it: other methods return another batch.

    Attributes:
        cache: Keys and values of all tokens so far.
        positions: (R, length) float32, positions so far.
        starts: The first token of each row in the cache; those before it are padding. Empty: all rows start at 0.
        overrides: What the plan changes in the model. Rows with different overrides are in different batches.
        layer_state: What the layers remember between passes.
        prompt_length: Tokens of the prompt, padding included; 0 until its last token has been read.
        length: Tokens in the cache, padding included.
        integer_positions: Whether the positions of the prompt's last pass are integers; the
            positions of generated tokens then are too.
        passage_spans: For each row the passages that it holds: (passage, first token, token after the last), counted
            in the cache.
    """

    loaded: LoadedModel
    cache: Any
    positions: Tensor
    starts: tuple[int, ...] = ()
    overrides: Overrides = field(default_factory=Overrides)
    layer_state: LayerState = field(default_factory=LayerState)
    prompt_length: int = 0
    length: int = 0
    integer_positions: bool = True
    passage_spans: tuple[tuple[tuple[int, int, int], ...], ...] = ()

    @classmethod
    def empty(
        cls,
        loaded: LoadedModel,
        n_rows: int = 1,
        overrides: Overrides | None = None,
        starts: tuple[int, ...] = (),
    ) -> SequenceBatch:
        positions = torch.zeros((n_rows, 0), device=loaded.device)
        # Our own cache where every layer keeps all keys, else the model's own kind.
        cache: Any
        if loaded.spec.unhooked is not None:
            cache = PlainCache(starts)
        elif loaded.keeps_all_keys:
            cache = GrowingCache(loaded.spec.shape.n_layers)
        else:
            cache = DynamicCache(config=loaded.model.config)
        return cls(loaded, cache, positions, starts, overrides or Overrides())

    @property
    def n_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def can_share_pass(self) -> bool:
        """Whether the next tokens may share a pass with the next tokens of other batches: see ``forward_batches``."""
        return self.loaded.keeps_all_keys and self.current_overrides().mask is None

    @property
    def row_starts(self) -> tuple[int, ...]:
        """The first token of each row in the cache."""
        return self.starts or (0,) * self.n_rows

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        keep: int,
        observer: Observer | None = None,
        *,
        ends_prompt: bool = True,
    ) -> Tensor:
        """Append tokens to every row and return the logits of the last ``keep`` of them.

        Args:
            positions: May be on the CPU for a prompt.
            observer: Receives the attention of the last tokens.
            ends_prompt: Whether the prompt, where it is still being read, ends with these tokens.

        Shapes:
            token_ids: (R, Tq). positions: (R, Tq) float32.
            returns: (R, keep, V), in the model's dtype.
        """
        if not self.prompt_length:
            self.integer_positions = torch.equal(positions.round(), positions)
            positions = positions.to(self.loaded.device)
        context = self.append(positions, observer, ends_prompt=ends_prompt)
        return run_model(
            self.loaded, context, self.cache, token_ids, position_ids(positions, self.integer_positions), keep
        )

    def prefill(self, token_ids: Tensor, positions: Tensor) -> None:
        """Append tokens of a prompt to every row; the last layer's output, which no key or value needs, is left out.

        Shapes: as ``forward``. Tokens of the prompt must follow.
        """
        if self.overrides.rotates_in_hook or self.overrides.attend is not None:  # the layers remember what they read
            self.forward(token_ids, positions, 1, ends_prompt=False)
        else:
            self.prefill_layers(token_ids, positions, self.loaded.spec.shape.n_layers - 1)

    def prefill_layers(
        self, token_ids: Tensor, positions: Tensor, last_layer: int, observer: Observer | None = None
    ) -> None:
        """Append tokens to every row in the layers up to ``last_layer``; the later layers do not run.

        For batches whose overrides leave attention and rotation to the model. Where ``last_layer`` is not the model's
        last, only ``prefill_layers`` may follow, to the same or an earlier layer.

        Shapes:
            token_ids: (R, Tq). positions: (R, Tq) float32; they may be on the CPU.
        """
        integer = torch.equal(positions.round(), positions)
        positions = positions.to(self.loaded.device)
        context = replace(self.append(positions, observer, ends_prompt=False), last_layer=last_layer)
        with contextlib.suppress(LastLayerRead):
            run_model(self.loaded, context, self.cache, token_ids, position_ids(positions, integer), 1)

    def append(
        self, positions: Tensor, observer: Observer | None = None, *, ends_prompt: bool = True
    ) -> ForwardContext:
        """Count tokens as appended, at (R, Tq) positions, and return the context of the pass over them."""
        overrides = self.current_overrides()
        if not self.prompt_length and self.loaded.spec.original_window is not None:
            last = float(positions.max())
            if self.loaded.reading(last + 1) is not self.loaded:
                raise GenerationError(
                    f"a prompt with positions up to {last:g} was begun with the frequencies of the original window of "
                    f"{self.loaded.spec.original_window} positions; please report this"
                )
        self.positions = torch.cat((self.positions, positions), dim=1)
        self.length += positions.shape[1]
        if ends_prompt and not self.prompt_length:
            self.prompt_length = self.length
        return ForwardContext(
            overrides,
            self.positions,
            self.loaded.spec,
            self.layer_state,
            self.prompt_length or self.length,
            observer,
            starts=self.row_starts if self.loaded.keeps_all_keys else None,
        )

    def next_positions(self, count: int = 1) -> Tensor:
        """Return the positions of the next ``count`` tokens: they continue after the last. (R, count)."""
        steps = torch.arange(1, count + 1, device=self.positions.device)
        return self.positions[:, -1:] + steps

    def select(self, rows: Sequence[int]) -> SequenceBatch:
        """Return the batch with only some of its rows; this one must not be used any more."""
        index = torch.tensor(rows, device=self.positions.device)
        if isinstance(self.cache, GrowingCache):
            cache = self.cache.copy(self.length, index)
        else:
            cache = self.cache
            if isinstance(cache, PlainCache):
                cache = cache.select(rows, index)
            else:
                cache.batch_select_indices(index)
        starts = tuple(self.starts[row] for row in rows) if self.starts else ()
        spans = tuple(self.passage_spans[row] for row in rows) if self.passage_spans else ()
        return replace(self, cache=cache, positions=self.positions[index], starts=starts, passage_spans=spans)

    def branch(self) -> SequenceBatch:
        """Return a batch that continues independently from here; this one stays as it is.

        It is valid until this one, or another branch of it, reads more tokens.

        Cost: nothing, where every layer keeps all keys; else a copy of the cache.
        """
        shared = isinstance(self.cache, GrowingCache)
        cache = self.cache.branch() if shared else copy.deepcopy(self.cache)
        return replace(self, cache=cache, layer_state=self.layer_state.copy())

    def truncated(self, length: int, overrides: Overrides | None = None) -> SequenceBatch:
        """Return a batch that holds a copy of the first ``length`` tokens, under other overrides; this one stays.

        For unpadded rows of models that keep all keys in every layer.
        """
        return SequenceBatch(
            self.loaded,
            self.cache.copy(length),
            self.positions[:, :length],
            overrides=overrides or Overrides(),
            length=length,
        )

    def current_overrides(self) -> Overrides:
        """Return the overrides of the next pass, without those that change nothing from here on."""
        overrides = self.overrides
        if self.prompt_length and overrides.mask is not None:  # generated tokens see all before them
            overrides = replace(overrides, mask=None)
        attend = overrides.attend
        if attend is not None and attend.standard_from is not None and self.length >= attend.standard_from:
            overrides = replace(overrides, attend=None)
        return overrides


def forward_batches(
    batches: Sequence[SequenceBatch],
    token_ids: Sequence[Tensor],
    keep: int,
    observers: Sequence[Observer | None] | None = None,
) -> list[Tensor]:
    """Append tokens to several batches in one pass, each at its own next positions; return each batch's logits.

    The weights are read once for all. Each row attends to its own keys in its own cache: no keys are padded or moved,
    so any batches may share any pass. They read their tokens one after another if one of them cannot share a pass.
    A pass of fewer than ``PassRows.least`` tokens gets rows of padding, which nothing reads. Passes of one
    token per row are computed in blocks of ``PassRows.block``.

    Args:
        token_ids: (R, Tq) of each batch, Tq the same for all.
        keep: Number of last tokens whose logits are returned.
        observers: Receive the attention of each batch's last tokens.
    """
    observers = observers or [None] * len(batches)
    counts, n_tokens = [batch.n_rows for batch in batches], token_ids[0].shape[1]
    rows = batches[0].loaded.pass_rows
    n_padding = max(0, -(-rows.least // n_tokens) - sum(counts))
    with blocks_of(rows.block if n_tokens == 1 else None):
        if (len(batches) < 2 and not n_padding) or not all(batch.can_share_pass for batch in batches):
            return [
                batch.forward(ids, batch.next_positions(n_tokens), keep, observer)
                for batch, ids, observer in zip(batches, token_ids, observers, strict=True)
            ]
        return _forward_together(batches, torch.cat(list(token_ids)), keep, observers, n_padding)


def _forward_together(
    batches: Sequence[SequenceBatch], ids: Tensor, keep: int, observers: Sequence[Observer | None], n_padding: int
) -> list[Tensor]:
    """Append (R, Tq) tokens, the rows of all batches, in one pass with rows of padding; return each batch's logits."""
    counts = [batch.n_rows for batch in batches]
    slices: list[BatchSlice] = []
    next_positions: list[Tensor] = []
    start = 0
    for batch, observer in zip(batches, observers, strict=True):
        positions = batch.next_positions(ids.shape[1])
        context, layers = batch.append(positions, observer), batch.cache.layers

        def keys(layer: int, layers: Any = layers) -> tuple[Tensor, Tensor]:
            return layers[layer].keys, layers[layer].values

        slices.append(BatchSlice(slice(start, start + batch.n_rows), context, keys))
        next_positions.append(positions)
        start += batch.n_rows
    positions = torch.cat(next_positions)
    if n_padding:
        ids, positions = (torch.cat((rows, rows[:1].expand(n_padding, -1))) for rows in (ids, positions))
        counts.append(n_padding)
    cache = ConcatenatedCache([batch.cache for batch in batches], counts)
    model_positions = position_ids(positions, all(batch.integer_positions for batch in batches))
    logits = run_model(batches[0].loaded, ForwardContext(slices=tuple(slices)), cache, ids, model_positions, keep)
    return list(torch.split(logits, counts))[: len(batches)]


def run_model(
    loaded: LoadedModel, context: ForwardContext, cache: Any, ids: Tensor, positions: Tensor, keep: int | Tensor
) -> Tensor:
    """Run the model on (R, Tq) tokens at positions in a context; return the logits of the last ``keep``, (R, keep, V).

    A tensor (K,) of indices keeps the logits of these tokens, (R, K, V).
    Without a cache (None) the tokens are all there are, and nothing is kept of them.
    Positions are integers, as the model was trained with them, where they are whole numbers.
    """
    if loaded.spec.unhooked is not None:
        return loaded.spec.unhooked(loaded.model, ids, cache, keep)
    with active(context):
        output = loaded.model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        )
    logits: Tensor = output.logits
    return logits


def projected_states(loaded: LoadedModel, token_ids: Sequence[int], marked: Sequence[int]) -> Tensor:
    """Return the state of each marked token of a prompt after the projector, (len(marked), P), in the model's dtype.

    Formula: W_n relu(... relu(W_1 h_i)), where h_i is the state of token i after the last norm, which the scores of
        the next token are computed from.
    Cost: one forward pass of the stock model over the prompt; nothing is kept.
    """
    ids = torch.tensor([token_ids], device=loaded.device)
    states: Tensor = loaded.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, list(marked)]
    for index, matrix in enumerate(loaded.projector):
        states = torch.nn.functional.linear(states.relu() if index else states, matrix.to(states.device))
    return states


def position_ids(positions: Tensor, integer: bool) -> Tensor:
    """Return whole positions as integers and fractional ones as they are."""
    return positions.round().long() if integer else positions
