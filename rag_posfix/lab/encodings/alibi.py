"""ALiBi: each head subtracts its own multiple of the distance from the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions, attend_with_bias, distances


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head: a geometric sequence from 2^(-8 / heads) with that ratio.

    For a number of heads that is no power of 2: the slopes of the next smaller power, then every second slope of the
    next larger one, as in the paper's code.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2 ** (-8 * (head + 1) / (2 * power)) for head in range(0, 2 * power, 2)]
    return [*slopes, *between[: heads - power]]


def alibi_bias(heads: int, n_query: int, n_key: int, device: torch.device) -> Tensor:
    """Return -m_h (i - j) for query i and key j.

    Shapes:
        returns: (H, Tq, Tk) float32.
    """
    slopes = torch.tensor(alibi_slopes(heads), device=device)
    return -slopes[:, None, None] * distances(n_query, n_key, device)


class _Slopes(Positions):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bias = alibi_bias(query.shape[1], query.shape[2], key.shape[2], query.device)
        return attend_with_bias(query, key, value, bias)


@ENCODINGS.register("alibi")
@dataclass(frozen=True)
class Alibi(Encoding):
    """Subtract a fixed multiple of the distance from the scores, another multiple in each head.

    Source: Press et al. (2022), Train Short, Test Long: Attention with Linear Biases, section 3,
        https://arxiv.org/abs/2108.12409
    Formula: score_ij = q_i k_j / sqrt(D) - m_h (i - j), m_h = 2^(-8 (h + 1) / H) for H a power of 2, h from 0.
    Cost: a bias of O(T^2) memory per head, shared by the sequences of a batch. Nothing is learned.
    """

    name = "alibi"
    memory = "per head"

    def build(self, shape: DecoderShape) -> Positions:
        """Return a module without parameters."""
        return _Slopes()
