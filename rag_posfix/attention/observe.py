"""How much attention the newest query pays to each key."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["last_query_attention"]


def last_query_attention(
    query: Tensor, key: Tensor, attention_mask: Tensor | None, scaling: float, softcap: float | None = None
) -> Tensor:
    """Return the attention probabilities of the last query, averaged over heads, in float32.

    Cost: one row of the score matrix, (B, Hq, 1, Tk).

    Shapes:
        query: (B, Hq, Tq, D). key: (B, Hkv, Tk, D). attention_mask: (B, 1, Tq, Tk), bool or additive, or None.
        returns: (B, Tk), each row sums to 1.
    """
    groups = query.shape[1] // key.shape[1]
    widened = key.repeat_interleave(groups, dim=1).float()  # (B, Hq, Tk, D)
    scores = query[:, :, -1:].float() @ widened.transpose(-1, -2) * scaling  # (B, Hq, 1, Tk)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        row = attention_mask[:, :, -1:, : key.shape[2]]
        scores = scores.masked_fill(~row, float("-inf")) if row.dtype == torch.bool else scores + row.float()
    return scores.softmax(dim=-1).mean(dim=(1, 2))  # (B, Tk)
