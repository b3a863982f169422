"""Sums of hidden states over strings, by group of strings, so that each group can be left out for an interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_posfix.probing.intervals import jackknife

GROUPS = 8


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
