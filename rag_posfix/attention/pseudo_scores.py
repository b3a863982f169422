"""Pseudo-scores above the causal diagonal, which take a part of each softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pseudo_log_mass(rows: Tensor, n_tokens: int, gamma: float) -> Tensor:
    """Return the log-sum-exp of the pseudo-scores of each row, -inf for a row without any.

    Formula: row i (from 1) of n: log sum_{j = i + 1}^{n} exp(-gamma (j - 1)), a geometric series of n - i terms:
        -gamma i + log(1 - exp(-gamma (n - i))) - log(1 - exp(-gamma)).

    Source: Yin et al. (2024), StableMask, https://arxiv.org/abs/2402.04779

    Shapes:
        rows: (Tq,) indices from 0. returns: (Tq,) float32.
    """
    terms = (n_tokens - 1 - rows).clamp(min=0).float()
    series = (-torch.expm1(-gamma * terms)).log() - math.log(-math.expm1(-gamma))
    return series - gamma * (rows + 1).float()
