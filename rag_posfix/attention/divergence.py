"""How far apart two distributions over tokens are."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def jensen_shannon(left: Tensor, right: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence in bits: 0 for equal distributions, 1 for ones without a common token.

    Formula: JSD(p, q) = (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2, logarithms to base 2.
    Source: Lin (1991), Divergence Measures Based on the Shannon Entropy, https://doi.org/10.1109/18.61115

    Shapes:
        left, right: (..., V) log-probabilities, float32; they broadcast.
        returns: (...).
    """
    middle = torch.logaddexp(left, right) - math.log(2)
    nats = (_divergence(left, middle) + _divergence(right, middle)) / 2
    return (nats / math.log(2)).clamp(0.0, 1.0)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) in nats; a token that p excludes counts nothing."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=-1)
