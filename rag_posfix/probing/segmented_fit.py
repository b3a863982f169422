"""Segmented least squares: the broken line that follows a curve, with as many pieces as pay for themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError

Segment = tuple[int, int, float, float]
"""First and last place of a piece, both included, and intercept and slope of its line over the places."""


def segmented_fit(curve: Tensor, penalty: float = 0.01) -> list[Segment]:
    """Return the straight pieces whose squared error and number together cost least.

    Source: Bellman (1961), On the approximation of curves by line segments using dynamic programming,
        https://doi.org/10.1145/366573.366611
    Formula: minimise sum over pieces of (least squared error of a line on it + C), C = ``penalty`` times the squared
        deviation of the whole curve from its mean, by OPT(j) = min_i (e_ij + C + OPT(i - 1)).
    Cost: O(T^2) numbers.

    Args:
        penalty: Price of a piece, as a share of the curve's squared deviation, above 0.

    Shapes:
        curve: (T,), two places or more.
    """
    count = curve.shape[0]
    if count < 2 or penalty <= 0:
        raise ConfigError(
            f"no fit of {count} places with penalty={penalty}; it takes two places and a penalty above 0"
        )
    values = curve.double() - curve.double().mean()
    price = penalty * max(float(values.square().sum()), 1e-12)
    errors = _errors(values)  # (T, T), [first, last]
    best, came = [0.0], [0]
    for last in range(count):
        costs = errors[: last + 1, last] + torch.tensor(best[: last + 1], dtype=torch.float64) + price
        first = int(costs.argmin())
        best.append(float(costs[first]))
        came.append(first)
    pieces, last = [], count - 1
    while last >= 0:
        first = came[last + 1]
        pieces.append(_line(curve.double(), first, last))
        last = first - 1
    return pieces[::-1]


def _errors(values: Tensor) -> Tensor:
    """Return the squared error of the best line on each piece, (T, T) by first and last place."""
    at = torch.arange(values.shape[0], dtype=torch.float64)

    def between(terms: Tensor) -> Tensor:
        total = torch.cat((terms.new_zeros(1), terms.cumsum(0)))
        return total[None, 1:] - total[:-1, None]  # [first, last]

    n, x, y = between(torch.ones_like(at)), between(at), between(values)
    xx, xy, yy = between(at * at), between(at * values), between(values * values)
    n = n.clamp(min=1)
    spread = xx - x * x / n
    slope = torch.where(spread > 1e-9, (xy - x * y / n) / spread.clamp(min=1e-9), 0.0)
    return (yy - y * y / n - slope * (xy - x * y / n)).clamp(min=0).triu()


def _line(values: Tensor, first: int, last: int) -> Segment:
    at = torch.arange(first, last + 1, dtype=torch.float64)
    own = values[first : last + 1]
    centred = at - at.mean()
    spread = float(centred.square().sum())
    slope = float((centred * own).sum()) / spread if spread else 0.0
    return first, last, float(own.mean()) - slope * float(at.mean()), slope
