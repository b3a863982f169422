"""95 % intervals of what probes measure, over prompts or strings, and sums of states by group of strings for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

RESAMPLES = 1000
GROUPS = 8

Statistic = Callable[[Tensor], Tensor]
"""Means (..., *rest) -> values (...)."""


def bootstrap_means(values: Tensor, seed: int = 0) -> Tensor:
    """Return the means of ``RESAMPLES`` draws with replacement, (RESAMPLES, ...) float64.

    Shapes:
        values: (n, ...), a row per prompt or string.
    """
    count = values.shape[0]
    draws = torch.randint(0, count, (RESAMPLES, count), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(RESAMPLES, count, dtype=torch.float64)
    weights.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))
    means: Tensor = weights @ values.double().reshape(count, -1) / count
    return means.view(RESAMPLES, *values.shape[1:])


def estimate(values: Tensor, statistic: Statistic = lambda means: means) -> dict[str, Any]:
    """Return ``value``, ``ci95`` and ``n`` of a statistic of means; rows are resampled whole, so they stay paired.

    Shapes:
        values: (n, ...), n >= 1.
    """
    low, high = torch.quantile(statistic(bootstrap_means(values)), torch.tensor([0.025, 0.975]).double()).tolist()
    value = float(statistic(values.double().mean(dim=0, keepdim=True)))
    return {"value": value, "ci95": [low, high], "n": values.shape[0]}


def jackknife(value: float, without: Tensor) -> list[float]:
    """Return the interval of a value by its values without one group of strings each.

    It suits what is quadratic in means, such as a share of variance, of which draws with replacement are biased.

    Source: Efron and Tibshirani (1993), An Introduction to the Bootstrap, chapter 11.
    Formula: value +- 1.96 sqrt((G - 1) / G sum_g (value_g - mean)^2).

    Shapes:
        without: (G,), G >= 2.
    """
    spread = without.double().var(correction=0).item() * (without.shape[0] - 1)
    return [value - 1.96 * spread**0.5, value + 1.96 * spread**0.5]


@dataclass(frozen=True, slots=True, eq=False)
class StateSums:
    """Sums of the states of strings.

    Shapes:
        total: (L, T, width). squares: (L,), over positions and channels. contexts: (C, L, width), means over T.
    """

    total: Tensor
    squares: Tensor
    contexts: Tensor

    @classmethod
    def merged(cls, parts: Sequence[StateSums]) -> StateSums:
        """Return the sums of all strings of these parts."""
        return cls(
            torch.stack([part.total for part in parts]).sum(dim=0),
            torch.stack([part.squares for part in parts]).sum(dim=0),
            torch.cat([part.contexts for part in parts]),
        )

    @property
    def count(self) -> int:
        """Number of strings."""
        return self.contexts.shape[0]


def sums_by_group(states: Iterable[Tensor], skip: int = 0, groups: int = GROUPS) -> list[StateSums]:
    """Return the sums of up to so many groups of strings; the first ``skip`` positions are left out.

    Shapes:
        states: (L, T, width) each, one per string.
    """
    parts: list[StateSums] = []
    for number, state in enumerate(states):
        tail = state[:, skip:].double()
        part = StateSums(tail, tail.square().sum(dim=(1, 2)), tail.mean(dim=1)[None])
        if number < groups:
            parts.append(part)
        else:
            parts[number % groups] = StateSums.merged((parts[number % groups], part))
    return parts


def intervals_by_group(parts: Sequence[StateSums], statistics: Callable[[StateSums], Tensor]) -> list[list[float]]:
    """Return the interval of each statistic (``jackknife``).

    Shapes:
        statistics: sums -> (K,).
    """
    whole = statistics(StateSums.merged(parts))
    without = [statistics(StateSums.merged([*parts[:n], *parts[n + 1 :]])) for n in range(len(parts))]
    return [jackknife(float(value), left) for value, left in zip(whole, torch.stack(without, dim=1), strict=True)]


def shown(measured: Mapping[str, Any] | None, style: str = ".2f") -> str:
    """Return an estimate as text, by default with two decimals: bfloat16 resolves no third one."""
    if measured is None:
        return "none"
    value, low, high = (format(number, style) for number in (measured["value"], *measured["ci95"]))
    return f"{value} ({low} to {high})"


def whiskers(measured: Any) -> list[list[float]]:
    """Return the distances of estimates to the ends of their intervals, as matplotlib's ``yerr`` takes them."""
    return [[abs(entry["value"] - entry["ci95"][end]) for entry in measured] for end in (0, 1)]


def draw_estimates(axes: Any, at: Any, measured: Any, *, across: bool = False, **style: Any) -> None:
    """Draw estimates with their intervals at places of x, or ``across`` at places of y."""
    entries = list(measured)
    values, style = [entry["value"] for entry in entries], {"fmt": "o", "markersize": 4, "capsize": 2, **style}
    places = list(at)
    x, y, error = (values, places, "xerr") if across else (places, values, "yerr")
    axes.errorbar(x, y, **{error: whiskers(entries)}, **style)
