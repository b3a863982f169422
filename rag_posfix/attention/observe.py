"""How much attention the newest query pays to each key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rag_posfix.attention.blockwise import last_row

__all__ = ["last_query_attention"]


def last_query_attention(
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    starts: Sequence[int] | None = None,
    *,
    rough: bool = False,
) -> Tensor:
    """Return the attention probabilities of the last query, averaged over heads, in float32.

    ``rough`` multiplies queries and keys in their own dtype, which spares a float32 copy of all keys: for shares.

    Cost: one row of the score matrix, (B, Hq, 1, Tk).

    Shapes:
        query: (B, Hq, Tq, D). key: (B, Hkv, Tk, D). attention_mask: (B, 1, Tq, Tk), bool or additive, or None.
        starts: the first key of each row; those before it get 0.
        returns: (B, Tk), each row sums to 1.
    """
    scores = _rough_row(query, key, scaling) if rough else last_row(query, key, scaling)  # (B, Hq, 1, Tk)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        row = attention_mask[:, :, -1:, : key.shape[2]]
        scores = scores.masked_fill(~row, float("-inf")) if row.dtype == torch.bool else scores + row.float()
    if starts is not None and any(starts):
        first = torch.tensor(starts, device=scores.device)[:, None, None, None]
        scores = scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) < first, float("-inf"))
    return scores.softmax(dim=-1).mean(dim=(1, 2))  # (B, Tk)


def _rough_row(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return the scores of the newest query, (B, Hq, 1, Tk) float32, multiplied in the dtype of the keys."""
    batch, heads, _, channels = query.shape
    folded = query[:, :, -1].reshape(batch, key.shape[1], -1, channels)  # (B, Hkv, Hq / Hkv, D)
    return (folded @ key.transpose(-1, -2)).float().reshape(batch, heads, 1, -1) * scaling
