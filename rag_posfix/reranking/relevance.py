"""From raw scores to ``relevance_score``: maps into [0, 1] that keep the order, and say so. Plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["shares", "sigmoid", "standing"]


def sigmoid(value: float) -> float:
    """Return 1 / (1 + exp(-value)), without overflow. NaN stays NaN."""
    if value >= 0:
        return 1.0 / (1.0 + math.exp(-value))
    grown = math.exp(value)
    return grown / (1.0 + grown)


def standing(raw: Sequence[float]) -> list[float]:
    """Return how each raw score stands among the others: 0.5 is the average one, equal scores stay equal.

    For scores without a scale of their own, which may be negative.

    Formula: sigmoid((s_k - mean(s)) / std(s)), the population's standard deviation; 0.5 where all are equal.
    """
    if not raw:
        return []
    mean = math.fsum(raw) / len(raw)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in raw) / len(raw))
    if deviation == 0:
        return [0.5] * len(raw)
    return [sigmoid((value - mean) / deviation) for value in raw]


def shares(raw: Sequence[float]) -> list[float]:
    """Return each score's part of their sum; equal parts where all are 0. For scores of 0 and above.

    Formula: s_k / sum(s).
    """
    total = math.fsum(raw)
    if not raw:
        return []
    return [min(value / total, 1.0) for value in raw] if total > 0 else [1 / len(raw)] * len(raw)
