"""One forward pass over rows with a cache, or over several groups of rows with a cache each. Alone calls the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rag_posfix.generation.model.kv_cache import GrowingCache, JointCache
from rag_posfix.patching.call import Edits, Member, Observer, Scratch, SeamCall, active
from rag_posfix.patching.spec import ModelSpec
from rag_posfix.plan.model_shape import Capability

__all__ = ["LoadedModel", "Rows", "forward_together", "new_cache", "run_model"]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model with the seam on it, and what is known of it."""

    model: Any
    spec: ModelSpec

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    @property
    def keeps_all_keys(self) -> bool:
        """Whether every layer keeps the keys of all tokens: their caches can be cut, joined and looked ahead from."""
        return Capability.FULL_CACHE in self.spec.shape.capabilities


def new_cache(loaded: LoadedModel) -> Any:
    """Return an empty key/value cache: our own where every layer keeps all keys, else of the model's own kind."""
    if loaded.keeps_all_keys:
        return GrowingCache(loaded.spec.shape.n_layers)
    return DynamicCache(config=loaded.model.config)


@dataclass(slots=True, eq=False)
class Rows:
    """Sequences that advance together: a batch with its cache, its padding and its positions.

    Attributes:
        loaded: The model.
        cache: Keys and values of all tokens so far.
        positions: (R, length) float32, positions so far.
        starts: The first token of each row in the cache; those before it are padding. Empty: all rows start at 0.
        edits: What the plan asks of the model. Rows with edits do not share a batch with rows that have others.
        scratch: What the layers remember.
        n_prompt: Tokens of the prompt; 0 until it has been read.
        length: Tokens in the cache, padding included.
        whole: Whether the positions of the last pass were whole numbers; those of generated tokens then are too.
        placed: The passages that each row holds, each with its first token in the cache and the one after its last.
    """

    loaded: LoadedModel
    cache: Any
    positions: Tensor
    starts: tuple[int, ...] = ()
    edits: Edits = field(default_factory=Edits)
    scratch: Scratch = field(default_factory=Scratch)
    n_prompt: int = 0
    length: int = field(default=0)
    whole: bool = True
    placed: tuple[tuple[tuple[int, int, int], ...], ...] = ()

    @property
    def n_rows(self) -> int:
        """How many sequences the batch holds."""
        return self.positions.shape[0]

    @property
    def joins(self) -> bool:
        """Whether the next tokens may be read in one pass with those of other rows: see ``forward_together``."""
        return self.loaded.keeps_all_keys and self.edits_now().mask is None

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """The first token of each row in the cache."""
        return self.starts or (0,) * self.n_rows

    def forward(self, token_ids: Tensor, positions: Tensor, keep: int, observer: Observer | None = None) -> Tensor:
        """Append tokens to every row and return the logits of the last ``keep`` of them.

        Shapes:
            token_ids: (R, Tq). positions: (R, Tq) float32.
            returns: (R, keep, V), in the model's dtype.
        """
        if not self.n_prompt:  # once per prompt and not per token: it waits for the device
            self.whole = torch.equal(positions.round(), positions)
        call = self.take(positions, observer)
        return run_model(self.loaded, call, self.cache, token_ids, _as_ids(positions, self.whole), keep)

    def take(self, positions: Tensor, observer: Observer | None = None) -> SeamCall:
        """Count tokens as appended, at (R, Tq) positions, and return what the pass over them is asked for."""
        edits = self.edits_now()
        self.positions = torch.cat((self.positions, positions), dim=1)
        self.length += positions.shape[1]
        self.n_prompt = self.n_prompt or self.length
        return SeamCall(
            edits,
            self.positions,
            self.loaded.spec,
            self.scratch,
            self.n_prompt,
            observer,
            starts=self.first_tokens if self.loaded.keeps_all_keys else None,
        )

    def next_positions(self, count: int = 1) -> Tensor:
        """Return the positions of the next ``count`` tokens: they continue after the last. (R, count)."""
        steps = torch.arange(1, count + 1, device=self.positions.device)
        return self.positions[:, -1:] + steps

    def select(self, kept: Sequence[int]) -> Rows:
        """Return the batch with only some of its rows; these rows are used up."""
        index = torch.tensor(kept, device=self.positions.device)
        if isinstance(self.cache, GrowingCache):
            cache = self.cache.copy(self.length, index)
        else:
            cache = self.cache
            cache.batch_select_indices(index)
        starts = tuple(self.starts[row] for row in kept) if self.starts else ()
        placed = tuple(self.placed[row] for row in kept) if self.placed else ()
        return replace(self, cache=cache, positions=self.positions[index], starts=starts, placed=placed)

    def fork(self) -> Rows:
        """Return rows that go their own way from here; these stay as they are.

        They are good until these rows advance, or others forked from them do.

        Cost: nothing, where every layer keeps all keys; else a copy of the cache.
        """
        shared = isinstance(self.cache, GrowingCache)
        cache = self.cache.look_ahead() if shared else copy.deepcopy(self.cache)
        return replace(self, cache=cache, scratch=self.scratch.copy())

    def first(self, length: int) -> Rows:
        """Return rows that hold the first ``length`` tokens and no edits; these stay as they are.

        For unpadded rows of models whose every layer keeps all keys.
        """
        return Rows(self.loaded, self.cache.copy(length), self.positions[:, :length], length=length)

    def edits_now(self) -> Edits:
        """Return the edits of the next pass. What is plain from here on costs nothing any more."""
        edits = self.edits
        if self.n_prompt and edits.mask is not None:  # generated tokens see all before them
            edits = replace(edits, mask=None)
        attend = edits.attend
        if attend is not None and attend.plain_from is not None and self.length >= attend.plain_from:
            edits = replace(edits, attend=None)
        return edits


def forward_together(
    groups: Sequence[Rows],
    token_ids: Sequence[Tensor],
    keep: int,
    observers: Sequence[Observer | None] | None = None,
) -> list[Tensor]:
    """Append tokens to groups of rows in one pass, each at its own next positions, and return each group's logits.

    The weights are read once for all. Each row attends to its own keys in its own cache: nothing is padded or moved,
    so any groups may share any pass. Groups read their tokens one after another if some of them do not ``join``.

    Args:
        groups: Rows of one model.
        token_ids: (R, Tq) of each group, Tq the same for all.
        keep: For how many of the last tokens logits are wanted.
        observers: What receives the attention of each group's newest tokens; None where nobody asks.
    """
    watching = observers or [None] * len(groups)
    if len(groups) < 2 or not all(rows.joins for rows in groups):
        parts = zip(groups, token_ids, watching, strict=True)
        return [rows.forward(ids, rows.next_positions(ids.shape[1]), keep, seen) for rows, ids, seen in parts]
    count = token_ids[0].shape[1]
    members: list[Member] = []
    newest: list[Tensor] = []
    at = 0
    for rows, seen in zip(groups, watching, strict=True):
        positions = rows.next_positions(count)
        own, layers = rows.take(positions, seen), rows.cache.layers

        def keys(layer: int, layers: Any = layers) -> tuple[Tensor, Tensor]:
            return layers[layer].keys, layers[layer].values

        members.append(Member(slice(at, at + rows.n_rows), own, keys))
        newest.append(positions)
        at += rows.n_rows
    counts = [rows.n_rows for rows in groups]
    call, cache = SeamCall(members=tuple(members)), JointCache([rows.cache for rows in groups], counts)
    ids = _as_ids(torch.cat(newest), all(rows.whole for rows in groups))
    logits = run_model(groups[0].loaded, call, cache, torch.cat(list(token_ids)), ids, keep)
    return list(torch.split(logits, counts))


def run_model(loaded: LoadedModel, call: SeamCall, cache: Any, ids: Tensor, positions: Tensor, keep: int) -> Tensor:
    """Run the model on (R, Tq) tokens at positions under a call; return the logits of the last ``keep``, (R, keep, V).

    Positions are integers, as the model was trained with them, where they are whole numbers.
    """
    with active(call):
        output = loaded.model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=keep
        )
    logits: Tensor = output.logits
    return logits


def _as_ids(positions: Tensor, whole: bool) -> Tensor:
    """Return whole positions as integers and fractional ones as they are."""
    return positions.round().long() if whole else positions
