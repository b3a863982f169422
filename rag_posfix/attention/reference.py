"""Attention the plain way: float32, every score materialised. The oracle that every fast path is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from rag_posfix.attention.rope import rotate_half_split


def reference_scores(query: Tensor, key: Tensor, distance: Tensor, frequencies: Tensor, scaling: float) -> Tensor:
    """Return q^T R(distance) k scaling for every pair: RoPE by relative distance alone.

    Source: Su et al. (2021), RoFormer, equation 16, https://arxiv.org/abs/2104.09864
    Formula: score(m, n) = (R_{m - n} q_m)^T k_n; with ``distance`` in the place of m - n.

    Shapes:
        query: (Hq, Tq, D) and key: (Hkv, Tk, D), unrotated. distance: (Tq, Tk) or (Hq, Tq, Tk), may be fractional.
        frequencies: (rotated / 2,). returns: (Hq, Tq, Tk) float32.

    Cost: a (Hq, Tq, Tk, D) tensor. For tests.
    """
    key = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0).float()
    angle = distance.expand(query.shape[0], -1, -1)[..., None].float() * frequencies.float()
    angle = torch.cat((angle, angle), dim=-1)  # (Hq, Tq, Tk, rotated)
    turned = rotate_half_split(query.float()[:, :, None].expand(-1, -1, key.shape[1], -1), angle.cos(), angle.sin())
    return (turned * key[:, None]).sum(dim=-1) * scaling


def reference_attention(scores: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Return softmax over the visible keys, times V.

    Shapes:
        scores: (Hq, Tq, Tk). value: (Hkv, Tk, D). visible: (Tq, Tk) bool. returns: (Hq, Tq, D) float32.
    """
    value = value.repeat_interleave(scores.shape[0] // value.shape[0], dim=0).float()
    return scores.float().masked_fill(~visible, float("-inf")).softmax(dim=-1) @ value
