"""Causal attention of a prompt's newest tokens, in whichever way is fastest where it is computed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rag_posfix.attention.blockwise import attend_with_lse

__all__ = ["attend_newest_tokens", "blocks", "in_pieces"]

SCORES = 3 * 2**19
"""Scores computed at a time, 3 or 6 MiB: few operations, in the processor's cache; allocators reuse the memory."""


def attend_newest_tokens(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Return softmax(QK^T scaling)V; query i sees keys 0..i + Tk - Tq: the queries are the newest tokens.

    Shapes:
        query: (B, Hq, Tq, D). key, value: (B, Hkv, Tk, D), Tk >= Tq. returns: (B, Hq, Tq, D).
    """
    if not query.shape[2]:
        return query
    # On CPUs plain products of bfloat16 are faster than the fused kernel.
    if query.device.type == "cpu" and query.dtype is torch.bfloat16:
        grouped = query.reshape(key.shape[0] * key.shape[1], -1, *query.shape[2:])
        return in_pieces(grouped, key.flatten(0, 1), value.flatten(0, 1), scaling).view(query.shape)
    return attend_with_lse(query, key, value, scaling, causal=True)[0]


def in_pieces(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Return the same as ``attend_newest_tokens``, spelled out in the dtype of ``query``.

    In bfloat16 rounding the scores moves the output by a few times what rounding queries and keys moved it.

    Cost: ``SCORES`` scores at a time.

    Shapes:
        query: (Hkv, G, Tq, D), G the query heads of a key head. key, value: (Hkv, Tk, D). returns: (Hkv, G, Tq, D).
    """
    n_key_heads, groups, n_query, _ = query.shape
    n_key = key.shape[1]
    out, unused = torch.empty_like(query), query.new_zeros(1)
    index = torch.arange(n_query, device=query.device)
    for heads, rows in blocks(n_key_heads, groups, n_query, n_key):
        part = query[heads, :, rows]  # (h, G, rows, D)
        scores = torch.baddbmm(unused, part.flatten(1, 2), key[heads].transpose(1, 2), beta=0, alpha=scaling)
        own = scores.view(*part.shape[:3], n_key)[..., n_key - n_query :]
        own.masked_fill_(index > index[rows, None], float("-inf"))
        out[heads, :, rows] = torch.bmm(scores.softmax(dim=-1), value[heads]).view(part.shape)
    return out


def blocks(n_key_heads: int, groups: int, n_query: int, n_key: int) -> Iterator[tuple[slice, slice]]:
    """Yield (key heads, queries) that cut attention into even pieces of at most ``SCORES`` scores.

    A piece holds at least one query of one group of heads, however many keys there are.
    """
    if not n_query:
        return
    most = max(1, SCORES // (groups * n_key))
    rows = -(-n_query // -(-n_query // most))  # pieces of one size
    heads = max(1, SCORES // (groups * rows * n_key))
    for first in range(0, n_query, rows):
        for head in range(0, n_key_heads, heads):
            yield slice(head, min(head + heads, n_key_heads)), slice(first, min(first + rows, n_query))
