"""Token segments: encoded independently, concatenated in a batch, found in the passage KV store and added to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rag_posfix.caching.kv.entry import (
    CacheSnapshot,
    EncodingKey,
    EntryShape,
    ExpectedShape,
    PassageKV,
    SnapshotShape,
    passage_key,
)
from rag_posfix.contracts.request import own_tags
from rag_posfix.generation.model.kv_cache import SPARE_TOKENS, GrowingCache
from rag_posfix.generation.model.sequence_batch import LoadedModel, SequenceBatch
from rag_posfix.patching.forward_context import Overrides
from rag_posfix.patching.plain import KeptKeys, PlainCache
from rag_posfix.patching.snapshots import SnapshotForm

if TYPE_CHECKING:
    from rag_posfix.caching.kv.store import PassageStore

BATCH_TOKENS = 8192
"""Segments are encoded together up to this many padded tokens: enough to fill the processor, little memory."""

COPIED_NUMBERS = 2**24
"""Keys or values of all rows that are copied at a time: few operations for short passages, little memory for long."""

TILE = 16
"""Query rows that attention kernels compute at once. Rows of an incomplete tile are computed in another way, in
bfloat16 with other last bits. Padded to whole tiles, the encoding of a segment does not depend on the longest of its
batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens to be read, and their positions, (T,) float32 on the CPU."""

    token_ids: tuple[int, ...]
    positions: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)


def encode_segments(
    loaded: LoadedModel, segments: Sequence[Segment], prefix: tuple[Segment, Tensor] | None, overrides: Overrides
) -> list[Tensor]:
    """Return the keys and values of each segment, encoded independently after ``prefix``.

    Segments of similar length share a batch. Padding is at the end, where the causal mask hides it.

    Shapes:
        prefix: its tokens, and their keys and values.
        returns: (2, L, Hkv, T, D) each: keys and values of all layers. No segment may be empty.
    """
    result: dict[int, Tensor] = {}
    by_length = sorted(range(len(segments)), key=lambda i: len(segments[i]))
    while by_length:
        longest = -(-max(len(segments[by_length[-1]]), loaded.least_rows) // TILE) * TILE
        count = max(1, BATCH_TOKENS // longest)
        some, by_length = by_length[-count:], by_length[:-count]
        if prefix is None:
            batch = SequenceBatch.empty(loaded, len(some), overrides)
        else:  # every row holds the prefix
            rows, positions = [[prefix[1]]] * len(some), [prefix[0].positions[None]] * len(some)
            batch = concatenate_kv(loaded, rows, positions, longest, overrides)
        before = batch.length
        tokens = torch.zeros((len(some), longest), dtype=torch.long)
        positions_of = torch.zeros((len(some), longest))
        for row, i in enumerate(some):
            tokens[row, : len(segments[i])] = torch.tensor(segments[i].token_ids)
            positions_of[row, : len(segments[i])] = segments[i].positions
            positions_of[row, len(segments[i]) :] = segments[i].positions[-1]
        batch.forward(tokens.to(loaded.device), positions_of, keep=1)
        result.update(zip(some, copy_rows(batch, before, [len(segments[i]) for i in some]), strict=True))
    return [result[i] for i in range(len(segments))]


def copy_kv(batch: SequenceBatch, start: int, stop: int, row: int = 0) -> Tensor:
    """Return a copy of the keys and values of some tokens of a row, (2, L, Hkv, stop - start, D), or a snapshot."""
    if (kept := batch.loaded.kept) is not None:
        return kept.flatten(batch.cache.held, start, stop, row)
    if (form := batch.loaded.snapshots) is not None:  # of all tokens read so far, which end at ``stop``
        return form.save(batch.cache.held)
    layers = batch.cache.layers
    keys = torch.stack([layer.keys[row, :, start:stop] for layer in layers])
    values = torch.stack([layer.values[row, :, start:stop] for layer in layers])
    return torch.stack((keys, values))


def copy_rows(batch: SequenceBatch, start: int, lengths: Sequence[int]) -> list[Tensor]:
    """Return a copy of the keys and values of each row's tokens from ``start`` on, (2, L, Hkv, length, D) each."""
    layers, first = batch.cache.layers, batch.cache.layers[0].keys
    copies = [first.new_empty((2, len(layers), first.shape[1], length, first.shape[3])) for length in lengths]
    step = max(1, COPIED_NUMBERS // first.numel())
    for layer in range(0, len(layers), step):
        some = layers[layer : layer + step]
        for half, kv in enumerate(([each.keys for each in some], [each.values for each in some])):
            stacked = torch.stack(kv)  # (l, R, Hkv, T, D)
            for row, (copy, length) in enumerate(zip(copies, lengths, strict=True)):
                copy[half, layer : layer + len(some)] = stacked[:, row, :, start : start + length]
    return copies


def concatenate_kv(
    loaded: LoadedModel,
    rows: Sequence[Sequence[Tensor]],
    positions: Sequence[Tensor],
    more_tokens: int,
    overrides: Overrides,
) -> SequenceBatch:
    """Return a batch whose rows hold segments end to end; shorter rows are padded in front.

    ``more_tokens`` will follow at least: the cache gets capacity for them.

    Shapes:
        rows: The keys and values of each row's segments, (2, L, Hkv, T, D) each.
        positions: (1, T) of each row, all its segments together, on the CPU.
    """
    lengths = [p.shape[1] for p in positions]
    longest = max(lengths)
    some = next((segment for row in rows for segment in row), None)
    if some is None:  # nothing was read yet in any row
        return SequenceBatch.empty(loaded, len(rows), overrides)
    cache: GrowingCache | PlainCache
    if loaded.snapshots is not None:
        cache = PlainCache(
            tuple(longest - n for n in lengths), loaded.snapshots.fill([row[0] for row in rows]), longest
        )
    elif loaded.kept is not None:
        cache = _plain_cache(loaded.kept, rows, lengths)
    else:
        cache = _growing_cache(rows, lengths, longest + more_tokens + SPARE_TOKENS)
    filled = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0)) for p in positions])
    starts = tuple(longest - length for length in lengths)
    return SequenceBatch(
        loaded,
        cache,
        filled.to(loaded.device),
        starts=starts if any(starts) else (),
        overrides=overrides,
        length=longest,
    )


def _growing_cache(rows: Sequence[Sequence[Tensor]], lengths: Sequence[int], capacity: int) -> GrowingCache:
    some, longest = next(segment for row in rows for segment in row), max(lengths)
    both, n_layers, n_heads, _, channels = some.shape
    buffers = some.new_empty((both, n_layers, len(rows), n_heads, capacity, channels))
    for row, segments in enumerate(rows):
        start = longest - lengths[row]
        buffers[:, :, row, :, :start] = 0  # nothing reads it, but a NaN there would spread through 0 * NaN
        for segment in segments:
            buffers[:, :, row, :, start : start + segment.shape[3]] = segment
            start += segment.shape[3]
    return GrowingCache.over(buffers, longest)


def _plain_cache(kept: KeptKeys, rows: Sequence[Sequence[Tensor]], lengths: Sequence[int]) -> PlainCache:
    longest, some = max(lengths), next(segment for row in rows for segment in row)
    flat = []
    for segments, length in zip(rows, lengths, strict=True):
        padding = some.new_zeros((2, 1, 1, longest - length, kept.width))
        flat.append(torch.cat([padding, *segments], dim=3))
    return PlainCache(tuple(longest - length for length in lengths), kept.cache(flat), longest)


def join_batches(form: SnapshotForm, batches: Sequence[SequenceBatch]) -> SequenceBatch:
    """Return a batch with the rows of batches without the attention hook; shorter rows are padded in front.

    Raises:
        SnapshotError: the caches do not fit into one.
    """
    longest = max(batch.length for batch in batches)
    starts = tuple(longest - batch.length for batch in batches)
    padded = [torch.nn.functional.pad(b.positions, (longest - b.length, 0)) for b in batches]
    return replace(
        batches[0],
        cache=PlainCache(starts, form.join([batch.cache.held for batch in batches]), longest),
        positions=torch.cat(padded),
        starts=starts if any(starts) else (),
        prompt_length=longest if batches[0].prompt_length else 0,
        length=longest,
    )


@dataclass(frozen=True, slots=True, eq=False)
class KVRequest:
    """A segment of tokens whose keys and values are needed.

    Attributes:
        before: The segments before it. Its keys and values depend on them and the model only.
        tags: The content keys of its passages; the entry can be deleted by them.
        is_history: Whether it is of a conversation's earlier turns, which are kept in memory alone.
    """

    segment: Segment
    before: tuple[Segment, ...] = ()
    tags: tuple[str, ...] = ()
    is_history: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class KVLookup:
    """The passage KV store as one prompt under one method sees it.

    Attributes:
        model: Identity of weights and dtype.
        method: Identity of the method and its parameters.
        salt: Entries of another salt are not seen: one per tenant.
        position: That of the store before the prompt is read.
    """

    store: PassageStore
    model: str
    method: str
    salt: str = ""
    position: int | None = None

    @classmethod
    def begin(cls, store: PassageStore, model: str, method: str, salt: str, position: int | None = None) -> KVLookup:
        """Return the store for a prompt whose documents were read at a ``position`` of its log; None: now."""
        return cls(store, model, method, salt, store.position if position is None else position)

    def independent_encoding(self, overrides: Overrides) -> EncodingKey:
        """Return what changes segments that are encoded independently, besides their tokens; part of their keys.

        Methods that differ in nothing else share entries.
        """
        return "apart", overrides.rope_base_factor, overrides.layer_scale

    def prefix_encoding(self, overrides: Overrides) -> EncodingKey:
        """Return what changes the first tokens of a prompt. Methods share segments that are read causally."""
        causal = overrides.attend is None and overrides.mask is None and not overrides.rotates_in_hook
        return "runs", overrides.rope_base_factor, overrides.layer_scale, "" if causal else self.method

    def snapshot_encoding(self, form: SnapshotForm) -> EncodingKey:
        """Return what changes a snapshot of a model without the attention hook, besides the tokens."""
        return "snapshot", form.name

    def history_encoding(self, overrides: Overrides, n_rows: int, n_tokens: int) -> EncodingKey:
        """Return what changes earlier turns that are read in rows of at most ``n_tokens``, besides their tokens.

        The padding of a row, and the number of rows, change its last bits.
        """
        return "history", overrides.rope_base_factor, overrides.layer_scale, n_rows, n_tokens

    def find(self, loaded: LoadedModel, encoding: EncodingKey, requests: Sequence[KVRequest]) -> list[Tensor | None]:
        """Return the keys and values (2, L, Hkv, T, D) of each segment, on the model's device; None if not stored.

        Of models with ``snapshots``, their bytes.
        """
        is_snapshot = loaded.snapshots is not None
        sizes, dtype = loaded.entry_sizes, torch.uint8 if is_snapshot else loaded.model.dtype
        keys = [self._key(dtype, encoding, request) for request in requests]
        entries: dict[str, PassageKV] = {}
        for is_history in (False, True):
            shapes: dict[str, ExpectedShape] = {
                key: SnapshotShape() if is_snapshot else EntryShape(*sizes, dtype, len(request.segment))
                for key, request in zip(keys, requests, strict=True)
                if request.is_history == is_history
            }
            if shapes:
                entries |= self.store.get_many(shapes, memory_only=is_history)
        return [entries[key].kv.to(loaded.device) if key in entries else None for key in keys]

    def add(self, encoding: EncodingKey, encoded: Sequence[tuple[KVRequest, Tensor]]) -> None:
        """Add the keys and values of segments to the store."""
        for is_history in (False, True):
            entries: dict[str, PassageKV] = {}
            tags: dict[str, Sequence[str]] = {}
            for request, kv in encoded:
                if request.is_history == is_history:
                    key = self._key(kv.dtype, encoding, request)
                    entries[key] = PassageKV(kv) if kv.ndim > 1 else CacheSnapshot(kv)
                    tags[key] = (*request.tags, *own_tags(self.salt, request.tags))
            if entries:
                self.store.put_many(entries, tags, memory_only=is_history, position=self.position)

    def _key(self, dtype: torch.dtype, encoding: EncodingKey, request: KVRequest) -> str:
        before = tuple(token for segment in request.before for token in segment.token_ids)
        positions = torch.cat([segment.positions for segment in (*request.before, request.segment)])
        cuts = (len(segment) for segment in request.before[1:])  # tokens that are cut otherwise have other last bits
        where = (encoding, *cuts, _consecutive_runs(positions))
        return passage_key(self.model, dtype, where, before, request.segment.token_ids, self.salt)


def _consecutive_runs(positions: Tensor) -> tuple[tuple[float, int], ...]:
    """Return positions as runs of consecutive ones: first and length of each."""
    values: list[float] = positions.tolist()
    runs, first = [], 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[i - 1] + 1:
            runs.append((values[first], i - first))
            first = i
    return tuple(runs)
