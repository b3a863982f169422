"""Keys and values of stretches of tokens: encoding them apart from each other, and laying them end to end in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_posfix.generation.model.kv_cache import ROOM, GrowingCache
from rag_posfix.generation.model.sequence_batch import LoadedModel, Rows, new_cache
from rag_posfix.patching.call import Edits

__all__ = ["Stretch", "cut_out", "encode", "join"]

BATCH_TOKENS = 8192
"""Stretches are encoded together up to this many padded tokens: enough to fill the processor, little memory."""

TILE = 16
"""Rows that attention kernels compute at once. Those of an incomplete tile are computed in another way, in bfloat16
with other last bits. Padded to whole tiles, what a stretch becomes does not depend on the longest of its batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Tokens to be read, and at which positions, (T,) float32."""

    token_ids: tuple[int, ...]
    positions: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)


def encode(
    loaded: LoadedModel, stretches: Sequence[Stretch], prefix: tuple[Stretch, Tensor] | None, edits: Edits
) -> list[Tensor]:
    """Return the keys and values of each stretch read after ``prefix`` alone; stretches do not see each other.

    Stretches of similar length share a batch. Padding stands at the end, where causality hides it.

    Shapes:
        prefix: its tokens, and their keys and values.
        returns: (2, L, Hkv, T, D) each: keys and values of all layers. No stretch may be empty.
    """
    result: dict[int, Tensor] = {}
    by_length = sorted(range(len(stretches)), key=lambda i: len(stretches[i]))
    while by_length:
        longest = -(-len(stretches[by_length[-1]]) // TILE) * TILE
        count = max(1, BATCH_TOKENS // longest)
        batch, by_length = by_length[-count:], by_length[:-count]
        rows = _after(loaded, prefix, len(batch), longest, edits)
        before = rows.length
        tokens = torch.zeros((len(batch), longest), dtype=torch.long)
        at = torch.zeros((len(batch), longest), device=loaded.device)
        for row, i in enumerate(batch):
            tokens[row, : len(stretches[i])] = torch.tensor(stretches[i].token_ids)
            at[row, : len(stretches[i])] = stretches[i].positions
            at[row, len(stretches[i]) :] = stretches[i].positions[-1]
        rows.forward(tokens.to(loaded.device), at, keep=1)
        for row, i in enumerate(batch):
            result[i] = cut_out(rows, before, before + len(stretches[i]), row)
    return [result[i] for i in range(len(stretches))]


def cut_out(rows: Rows, start: int, stop: int, row: int = 0) -> Tensor:
    """Return a copy of the keys and values of some tokens of a row. Shape (2, L, Hkv, stop - start, D)."""
    layers = rows.cache.layers
    keys = torch.stack([layer.keys[row, :, start:stop] for layer in layers])
    values = torch.stack([layer.values[row, :, start:stop] for layer in layers])
    return torch.stack((keys, values))


def join(
    loaded: LoadedModel, rows: Sequence[Sequence[Tensor]], positions: Sequence[Tensor], room: int, edits: Edits
) -> Rows:
    """Return a batch whose rows hold stretches end to end; shorter rows are padded in front.

    Args:
        loaded: The model.
        rows: The keys and values of each row's stretches, (2, L, Hkv, T, D) each.
        positions: (1, T) of each row, all its stretches together.
        room: Tokens that will follow at least.
        edits: What the rows ask of the model from here on.
    """
    lengths = [p.shape[1] for p in positions]
    longest = max(lengths)
    some = next((stretch for row in rows for stretch in row), None)
    if some is None:  # nothing was read yet in any row
        empty = torch.zeros((len(rows), 0), device=loaded.device)
        return Rows(loaded, new_cache(loaded), empty, edits=edits)
    both, n_layers, n_heads, _, channels = some.shape
    buffers = some.new_empty((both, n_layers, len(rows), n_heads, longest + room + ROOM, channels))
    for row, stretches in enumerate(rows):
        at = longest - lengths[row]
        buffers[:, :, row, :, :at] = 0  # nothing reads it, but a NaN there would spread through 0 * NaN
        for stretch in stretches:
            buffers[:, :, row, :, at : at + stretch.shape[3]] = stretch
            at += stretch.shape[3]
    filled = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0)) for p in positions])
    starts = tuple(longest - length for length in lengths)
    return Rows(
        loaded,
        GrowingCache.over(buffers, longest),
        filled,
        starts=starts if any(starts) else (),
        edits=edits,
        length=longest,
    )


def _after(loaded: LoadedModel, prefix: tuple[Stretch, Tensor] | None, count: int, room: int, edits: Edits) -> Rows:
    """Return ``count`` rows that hold the prefix."""
    if prefix is None:
        return Rows(loaded, new_cache(loaded), torch.zeros((count, 0), device=loaded.device), edits=edits)
    stretch, states = prefix
    return join(loaded, [[states]] * count, [stretch.positions[None]] * count, room, edits)
