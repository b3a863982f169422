"""Score normalisation: monotonic maps from the raw scores of a list to ``relevance_score`` in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence

ROUNDING = 1e-6
"""Scores whose standard deviation is below this share of the largest are equal."""


def sigmoid(value: float) -> float:
    """Return 1 / (1 + exp(-value)), without overflow. NaN stays NaN."""
    if value >= 0:
        return 1.0 / (1.0 + math.exp(-value))
    exponential = math.exp(value)
    return exponential / (1.0 + exponential)


def sigmoid_of_z_scores(raw: Sequence[float]) -> list[float]:
    """Return the sigmoid of each score's z-score in the list: 0.5 for the mean; equal scores stay equal.

    For scores without a fixed scale, which may be negative.

    Formula: sigmoid((s_k - mean(s)) / std(s)) with the population standard deviation; 0.5 for each if all are equal.
    """
    return [sigmoid(value) for value in z_scores(raw)]


def z_scores(raw: Sequence[float]) -> list[float]:
    """Return (s_k - mean(s)) / std(s) of each score, with the population standard deviation.

    All are 0 if the scores are equal up to the rounding of float32: otherwise rounding would become a difference of
    the size of any other.
    """
    if not raw:
        return []
    mean = math.fsum(raw) / len(raw)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in raw) / len(raw))
    if deviation <= ROUNDING * max(map(abs, raw)):
        return [0.0] * len(raw)
    return [(value - mean) / deviation for value in raw]


def sum_normalized(raw: Sequence[float]) -> list[float]:
    """Return each score divided by the sum of the list; equal parts if all are 0. For scores of 0 and above.

    Formula: s_k / sum(s).
    """
    total = math.fsum(raw)
    if not raw:
        return []
    return [min(value / total, 1.0) for value in raw] if total > 0 else [1 / len(raw)] * len(raw)
