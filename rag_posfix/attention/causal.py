"""Causal attention where the queries are the last Tq of the Tk tokens (a bottom-right aligned causal mask)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rag_posfix.attention.blockwise import attend_with_lse, has_lse_kernel


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
