"""How much attention the last queries pay to each key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from rag_posfix.attention.blockwise import runs, scores

ROWS = 64
"""Number of queries whose attention is materialised at a time."""


def last_query_attention(
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    starts: Sequence[int] | None = None,
    count: int = 1,
    sinks: Tensor | None = None,
    *,
    approximate: bool = False,
) -> Tensor:
    """Return the attention probabilities of the last ``count`` queries, averaged over them and over heads, in float32.

    ``approximate`` multiplies queries and keys in their own dtype, which spares a float32 copy of all keys: for
    shares.

    Cost: the requested rows of the score matrix, at most 64 at a time: (B, Hq, 64, Tk).

    Shapes:
        query: (B, Hq, Tq, D), the last of the tokens that the keys belong to. key: (B, Hkv, Tk, D).
        attention_mask: (B, 1, Tq, Tk), bool or additive; None is causal.
        starts: the first key of each row; keys before it get 0.
        sinks: (Hq,) scores of a column without a value, whose probability is left out.
        returns: (B, Tk), each row sums to 1, less the sinks.
    """
    blocks = _row_blocks(query, key, attention_mask, scaling, softcap, sinks, starts, count, approximate)
    return reduce(torch.add, [probabilities.mean(dim=(1, 2)) * share for probabilities, share in blocks])


def head_attention(
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    heads: Sequence[int],
    softcap: float | None = None,
    starts: Sequence[int] | None = None,
    count: int = 1,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention probabilities of the last ``count`` queries in some heads, averaged over the queries.

    Cost: as ``last_query_attention``, for these heads alone.

    Shapes: as ``last_query_attention``.
        heads: query heads, from 0.
        returns: (B, len(heads), Tk) float32, each row sums to 1, less the sinks.
    """
    per_key = query.shape[1] // key.shape[1]
    query, key = query[:, list(heads)], key[:, [head // per_key for head in heads]]
    sinks = None if sinks is None else sinks[list(heads)]
    blocks = _row_blocks(query, key, attention_mask, scaling, softcap, sinks, starts, count, approximate=False)
    return reduce(torch.add, [probabilities.mean(dim=2) * share for probabilities, share in blocks])


def _row_blocks(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    starts: Sequence[int] | None,
    count: int,
    approximate: bool,
) -> Iterator[tuple[Tensor, float]]:
    """Yield the probabilities of some of the last queries, (B, Hq, R, Tk), and their share of the ``count``."""
    n_query = query.shape[2]
    for start in range(n_query - count, n_query, ROWS):
        stop = min(start + ROWS, n_query)
        rows = query[:, :, start:stop]
        score = _approximate_scores if approximate else scores
        logits = score(rows, key, scaling)  # (B, Hq, stop - at, Tk)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        logits = _masked(logits, mask, n_query - stop)
        if starts is not None and any(starts):
            for rows_alike, first in runs(starts):  # slices, not a mask: a mask would be an upload in every layer
                if first:
                    logits[rows_alike, :, :, :first] = float("-inf")
        if sinks is None:
            yield logits.softmax(dim=-1), (stop - start) / count
        else:
            column = sinks.float()[:, None, None].expand(*logits.shape[:3], 1)
            yield torch.cat((logits, column), dim=-1).softmax(dim=-1)[..., :-1], (stop - start) / count


def _masked(logits: Tensor, mask: Tensor | None, after: int) -> Tensor:
    """Hide what the queries do not see; ``after`` more queries follow them."""
    n_rows, n_key = logits.shape[2:]
    if mask is not None:
        stop = mask.shape[2] - after
        rows = mask[:, :, stop - n_rows : stop, :n_key]
        return logits.masked_fill(~rows, float("-inf")) if rows.dtype == torch.bool else logits + rows.float()
    if n_rows + after == 1:  # the last query sees every key
        return logits
    last_visible = torch.arange(n_key - after - n_rows, n_key - after, device=logits.device)[:, None]
    return logits.masked_fill(torch.arange(n_key, device=logits.device) > last_visible, float("-inf"))


def _approximate_scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return the scores of queries, (B, Hq, R, Tk) float32, multiplied in the dtype of the keys."""
    batch, heads, n_rows, channels = query.shape
    folded = query.reshape(batch, key.shape[1], -1, channels)  # (B, Hkv, Hq / Hkv R, D)
    return (folded @ key.transpose(-1, -2)).float().reshape(batch, heads, n_rows, -1) * scaling
