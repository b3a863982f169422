"""Statistics of training data: lengths, sources, and whether places are uniform."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rag_posfix.evaluation.figures import OTHER_COLORS, new_axes
from rag_posfix.training.data.sample import Sample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACE_BINS = 10


def place_counts(samples: Iterable[Sample], bins: int = PLACE_BINS) -> tuple[list[int], list[float]]:
    """Return how many gold passages are in each part of their prompts, and how many are expected there.

    Formula: place p of n passages is in part floor(bins p / n). A sample with g gold passages is expected to have
        g |{p: part(p) = b}| / n of them in part b. For one gold passage per sample this is exact; several in one
        sample are not independent, and their statistic is smaller than chi-square.
    """
    found, expected = [0] * bins, [0.0] * bins
    for one in samples:
        n = len(one.passages)
        for place in range(n):
            expected[bins * place // n] += len(one.gold) / n
        for place in one.gold:
            found[bins * place // n] += 1
    return found, expected


def chi_square(found: Sequence[float], expected: Sequence[float]) -> tuple[float, int, float]:
    """Return Pearson's statistic, its degrees of freedom, and the probability of a larger one.

    Formula: X = sum (O - E)^2 / E over the parts with E > 0; p = Q(df / 2, X / 2), the regularised upper incomplete
        gamma function.
    """
    import torch

    parts = [(o, e) for o, e in zip(found, expected, strict=True) if e > 0]
    statistic = sum((o - e) ** 2 / e for o, e in parts)
    degrees = max(len(parts) - 1, 0)
    if not degrees:
        return statistic, 0, 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return statistic, degrees, float(torch.special.gammaincc(half[0], half[1]))


def statistics_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return what is counted of training data, as JSON."""
    found, expected = place_counts(samples)
    statistic, degrees, p_value = chi_square(found, expected)
    tokens = sorted(one.tokens for one in samples)
    return {
        "n": len(samples),
        "sources": dict(sorted(Counter(one.source for one in samples).items())),
        "gold_passages": _counted(len(one.gold) for one in samples),
        "length_bins": _counted(one.length_bin for one in samples),
        "tokens": {"least": tokens[0], "median": tokens[len(tokens) // 2], "most": tokens[-1]},
        "passages": {"least": min(_sizes(samples)), "most": max(_sizes(samples))},
        "rejected": sum(one.rejected for one in samples),
        "places": {
            "found": found,
            "expected": [round(one, 3) for one in expected],
            "chi_square": statistic,
            "degrees_of_freedom": degrees,
            "p_value": p_value,
        },
    }


def _sizes(samples: Sequence[Sample]) -> list[int]:
    return [len(one.passages) for one in samples]


def _counted(values: Iterable[int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items())}


def draw_places(head: Mapping[str, Any]) -> Figure:
    """Return the figure of a record of ``train data``: gold passages by the part of the prompt that they are in."""
    places = head["summary"]["places"]
    figure, axes = new_axes((5.4, 3.0))
    at = range(len(places["found"]))
    axes.bar(at, places["found"], 0.7, color=OTHER_COLORS[0], label="found")
    axes.step(at, places["expected"], where="mid", color=OTHER_COLORS[2], label="expected")
    axes.set_xlabel("part of the prompt, from its beginning")
    axes.set_ylabel("gold passages")
    axes.set_title(f"places of gold passages: p = {places['p_value']:.2f}", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8)
    return figure
