"""Causal attention where the queries are the last Tq of the Tk tokens (a bottom-right aligned causal mask)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rag_posfix.attention.blockwise import attend_with_lse, has_lse_kernel, merge

TILE_SCORES = 3 * 2**19
"""Scores computed at a time, 3 or 6 MiB: few operations, in the processor's cache; allocators kv_lookup the memory."""


def attend_causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Return causal softmax(QK^T scaling)V, where the queries are the last Tq of the Tk tokens.

    A whole prompt (Tq = Tk) is computed by the call that transformers' own SDPA path makes. A single token is computed
    with the query heads of a group as queries of one head, so that no key is read twice. In between, keys of the past
    and of the queries are attended to separately and merged.

    Shapes:
        query: (B, Hq, Tq, D). key, value: (B, Hkv, Tk, D), Tk >= Tq. returns: (B, Hq, Tq, D).

    Cost: no (Tq, Tk) tensor on CPUs and GPUs; elsewhere a bool one where 1 < Tq < Tk.
    """
    n_query, n_key = query.shape[2], key.shape[2]
    if n_query == 1:
        folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])  # (B, Hkv, Hq / Hkv, D)
        return scaled_dot_product_attention(folded, key, value, scale=scaling).reshape(query.shape)
    gqa = query.shape[1] != key.shape[1]
    if n_query == n_key:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
    if has_lse_kernel(query.device):
        return attend_with_lse(query, key, value, scaling, causal=True)[0]
    index = torch.arange(n_key, device=key.device)
    mask = index[None, :] <= index[n_key - n_query :, None]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa)


def attend_causal_rows(query: Tensor, key: Tensor, value: Tensor, scaling: float, starts: Sequence[int]) -> Tensor:
    """Return the same where row b has no tokens before ``starts[b]``: neighbours with equal starts share a call."""
    groups = list(runs(starts))
    if not any(starts):
        return attend_causal(query, key, value, scaling)
    if len(groups) == 1:
        return attend_causal(query, key[:, :, starts[0] :], value[:, :, starts[0] :], scaling)
    return torch.cat(
        [attend_causal(query[rows], key[rows, :, start:], value[rows, :, start:], scaling) for rows, start in groups]
    )


def runs(starts: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Yield neighbouring rows with equal starts, and that start."""
    first = 0
    for start, group in itertools.groupby(starts):
        last = first + len(list(group))
        yield slice(first, last), start
        first = last


def attend_causal_fast(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Return softmax(QK^T scaling)V; query i sees keys 0..i + Tk - Tq.

    In bfloat16 on CPUs without matrix units the scores are computed tile by tile in that dtype, elsewhere by
    ``attend_with_lse``.

    Shapes:
        query: (B, Hq, Tq, D). key, value: (B, Hkv, Tk, D), Tk >= Tq. returns: (B, Hq, Tq, D).
    """
    if not query.shape[2]:
        return query
    if in_tiles(query):
        grouped = query.reshape(key.shape[0] * key.shape[1], -1, *query.shape[2:])
        return attend_causal_tiled(grouped, key.flatten(0, 1), value.flatten(0, 1), scaling).view(query.shape)
    return attend_with_lse(query, key, value, scaling, causal=True)[0]


def attend_causal_each(segments: Iterable[tuple[Tensor, Tensor, Tensor]], scaling: float) -> Tensor:
    """Return ``attend_causal_fast`` of several segments (query, key, value), the outputs of all rows end to end.

    Attention to the keys before the queries and to the queries' own keys is merged once for all segments: fewer calls.

    Shapes:
        segments: as ``attend_causal_fast``; each has keys before its queries, or only one has tokens.
        returns: (1, Hq, sum of B Tq, D).
    """
    outs, before, within = [], [], []
    for query, key, value in segments:
        past = key.shape[2] - query.shape[2]
        if in_tiles(query) or not past:
            outs.append(_end_to_end(attend_causal_fast(query, key, value, scaling)))
        elif query.shape[2]:
            past_key, own_key = torch.split(key, [past, query.shape[2]], dim=2)
            past_value, own_value = torch.split(value, [past, query.shape[2]], dim=2)
            before.append(attend_with_lse(query, past_key, past_value, scaling))
            within.append(attend_with_lse(query, own_key, own_value, scaling, causal=True))
    if before:
        outs.append(merge([_concatenate(before), _concatenate(within)])[0])
    return torch.cat(outs, dim=2)


def _concatenate(outputs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    outs, lses = zip(*outputs, strict=True)
    return torch.cat([_end_to_end(out) for out in outs], dim=2), torch.cat([_end_to_end(lse) for lse in lses], dim=2)


def _end_to_end(states: Tensor) -> Tensor:
    """Return the tokens of all rows in one: (B, H, T, ...) -> (1, H, B T, ...)."""
    return states if states.shape[0] == 1 else states.transpose(0, 1).flatten(1, 2)[None]


def in_tiles(query: Tensor) -> bool:
    """Return whether plain products are faster than the fused kernel: in bfloat16, on CPUs without matrix units."""
    return query.dtype is torch.bfloat16 and products_are_faster(query)


def products_are_faster(query: Tensor) -> bool:
    """Return whether scores alone are faster as plain products: on CPUs, but for bfloat16 in matrix units."""
    return query.device.type == "cpu" and not (query.dtype is torch.bfloat16 and has_matrix_units())


@cache
def has_matrix_units() -> bool:
    """Return whether the processor has units that multiply bfloat16 matrices (AMX), which fused kernels use."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def attend_causal_tiled(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Return the same as ``attend_causal_fast``, tile by tile in the dtype of ``query``.

    In bfloat16 rounding the scores moves the output by a few times what rounding queries and keys moved it.

    Cost: ``TILE_SCORES`` scores at a time.

    Shapes:
        query: (Hkv, G, Tq, D), G the query heads of a key head. key, value: (Hkv, Tk, D). returns: (Hkv, G, Tq, D).
    """
    n_key_heads, groups, n_query, _ = query.shape
    n_key = key.shape[1]
    out, unused = torch.empty_like(query), query.new_zeros(1)
    index = torch.arange(n_query, device=query.device)
    for heads, rows in tiles(n_key_heads, groups, n_query, n_key):
        tile = query[heads, :, rows]  # (h, G, rows, D)
        scores = torch.baddbmm(unused, tile.flatten(1, 2), key[heads].transpose(1, 2), beta=0, alpha=scaling)
        own_scores = scores.view(*tile.shape[:3], n_key)[..., n_key - n_query :]
        own_scores.masked_fill_(index > index[rows, None], float("-inf"))
        out[heads, :, rows] = torch.bmm(scores.softmax(dim=-1), value[heads]).view(tile.shape)
    return out


def tiles(n_key_heads: int, groups: int, n_query: int, n_key: int) -> Iterator[tuple[slice, slice]]:
    """Yield (key heads, queries) that cut attention into even tiles of at most ``TILE_SCORES`` scores.

    A tile holds at least one query of one group of heads, however many keys there are.
    """
    if not n_query:
        return
    max_rows = max(1, TILE_SCORES // (groups * n_key))
    rows = -(-n_query // -(-n_query // max_rows))  # tiles of one size
    heads = max(1, TILE_SCORES // (groups * rows * n_key))
    for first in range(0, n_query, rows):
        for head in range(0, n_key_heads, heads):
            yield slice(head, min(head + heads, n_key_heads)), slice(first, min(first + rows, n_query))
