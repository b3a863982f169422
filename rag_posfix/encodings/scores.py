"""Causal attention from scores or with a bias, for encodings that the fused kernel does not know."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def distances(n_query: int, n_key: int, device: torch.device) -> Tensor:
    """Return i - j for query i and key j, where queries are the last of the tokens; below 0 for future keys.

    Shapes:
        returns: (Tq, Tk) int64.
    """
    at = torch.arange(n_key, device=device)
    return at[n_key - n_query :, None] - at


def hide_future(scores: Tensor) -> Tensor:
    """Return scores with -inf at future keys.

    Shapes:
        scores: (..., Tq, Tk). returns: the same.
    """
    future = distances(scores.shape[-2], scores.shape[-1], scores.device) < 0
    return scores.masked_fill(future, float("-inf"))


def attend_scores(scores: Tensor, value: Tensor) -> Tensor:
    """Return causal softmax(scores) V; the softmax is in float32.

    Cost: O(Tq Tk) memory per head and sequence.

    Shapes:
        scores: (B, H, Tq, Tk), scaled. value: (B, H, Tk, D). returns: (B, H, Tq, D).
    """
    return hide_future(scores.float()).softmax(dim=-1).to(value.dtype) @ value


def attend_with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Return causal softmax(Q K^T / sqrt(D) + bias) V.

    Cost: the bias, O(Tq Tk) memory per head, is shared by the sequences of a batch; scores are not kept.

    Shapes:
        query: (B, H, Tq, D). key, value: (B, H, Tk, D). bias: (H | 1, Tq, Tk). returns: (B, H, Tq, D).
    """
    mask = hide_future(bias).to(query.dtype)[None]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask)
