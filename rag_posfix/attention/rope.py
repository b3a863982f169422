"""Rotary position encoding: rotating vectors by given angles. Angles come from the model, never from here."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate_half_split"]


def rotate_half_split(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``cos.shape[-1]`` channels of each vector, pairing channel i with channel i + half.

    Source: Su et al. (2021), RoFormer, section 3.4.2, https://arxiv.org/abs/2104.09864; the pairing is that of Llama
    (first half with second half), not the paper's (neighbours).
    Formula: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). Channels beyond the rotated ones (partial rotary) pass.

    Shapes:
        states: (B, H, T, D). cos, sin: broadcast to (B, H, T, rotated), in the dtype of ``states``.
    """
    n_rotated = cos.shape[-1]
    turned, kept = states[..., :n_rotated], states[..., n_rotated:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned
