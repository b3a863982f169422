"""Intervals by bootstrap over questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["bootstrap_interval", "mean"]


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def bootstrap_interval(
    rows: Sequence[Sequence[float]],
    statistic: Callable[[Sequence[float]], float],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the 95 % percentile interval of a statistic of column means, questions resampled whole.

    Args:
        rows: One row per question, one column per condition. Resampling whole rows keeps conditions paired.
        statistic: Of the column means, for example ``min`` (worst position) or a difference of two of them.
        resamples: Number of resamples.
        seed: Seeds the resampling.

    Cost: questions x conditions x resamples.
    """
    import numpy as np

    table = np.asarray(rows, dtype=float)
    draws = np.random.default_rng(seed).integers(0, len(table), size=(resamples, len(table)))
    values = [statistic(list(table[draw].mean(axis=0))) for draw in draws]
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
