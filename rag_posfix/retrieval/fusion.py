"""Rank fusion: several rankings of documents as one. Pure functions over ids and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def reciprocal_ranks(rankings: Sequence[Sequence[str]], weights: Sequence[float], constant: float) -> dict[str, float]:
    """Return the score of each id by reciprocal rank fusion, in [0, 1].

    Source: Cormack, Clarke and Büttcher, SIGIR 2009.
    Formula: score(d) = sum over the rankings i that contain d of  w_i / (c + rank_i(d)),  rank from 1, divided by
        its maximum, sum of w_i / (c + 1), which a document has that is first in all rankings. The paper has neither
        weights nor this division.

    Args:
        rankings: Ids, best first, each once per ranking.
        weights: One per ranking, none negative, at least one positive.
        constant: The paper's k, 60 there: the larger, the smaller the advantage of the first ranks.
    """
    largest = sum(weights) / (constant + 1)
    fused: dict[str, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, name in enumerate(ranking, start=1):
            fused[name] = fused.get(name, 0.0) + weight / (constant + rank)
    return {name: min(score / largest, 1.0) for name, score in fused.items()}


def weighted_scores(rankings: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Return the weighted mean of the scores of each id, in [0, 1], after ``min_max`` of each ranking.

    A document counts 0, the lowest score, in a ranking that does not contain it. Bruch, Gai and Ingber (arXiv
    2210.11934) compare such convex combinations with reciprocal rank fusion.

    Args:
        weights: One per ranking, none negative, at least one positive.
    """
    fused: dict[str, float] = {}
    for scores, weight in zip(rankings, weights, strict=True):
        for name, score in min_max(scores).items():
            fused[name] = fused.get(name, 0.0) + weight * score
    return {name: min(score / sum(weights), 1.0) for name, score in fused.items()}


def min_max(scores: Mapping[str, float]) -> dict[str, float]:
    """Return ``(s - min) / (max - min)`` for each score; 1 for each if all are equal."""
    if not scores:
        return {}
    low, high = min(scores.values()), max(scores.values())
    if low == high:
        return dict.fromkeys(scores, 1.0)
    return {name: (score - low) / (high - low) for name, score in scores.items()}
