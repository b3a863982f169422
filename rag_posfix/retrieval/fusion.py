"""Several rankings of documents as one. Pure functions over ids and scores; knows nothing of who found what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["min_max", "reciprocal_ranks", "weighted_scores"]


def reciprocal_ranks(rankings: Sequence[Sequence[str]], weights: Sequence[float], constant: float) -> dict[str, float]:
    """Return the fused score of each id by the places that it has, in [0, 1].

    Reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009):
    score(d) = sum over the rankings i that hold d of  w_i / (c + rank_i(d)),  rank from 1,
    here divided by its largest value, sum of w_i / (c + 1), which a document that is first everywhere has. The paper
    has no weights.

    Args:
        rankings: Ids, best first, each once per ranking.
        weights: One per ranking, none negative, one positive.
        constant: The paper's k, 60 there: how little the first places stand out.
    """
    largest = sum(weights) / (constant + 1)
    fused: dict[str, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, name in enumerate(ranking, start=1):
            fused[name] = fused.get(name, 0.0) + weight / (constant + rank)
    return {name: min(score / largest, 1.0) for name, score in fused.items()}


def weighted_scores(rankings: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Return the weighted mean of the scores of each id, in [0, 1], after ``min_max`` of each ranking.

    A ranking that does not hold a document counts as its lowest score, 0. Bruch, Gai and Ingber (arXiv 2210.11934)
    study such convex combinations beside ``reciprocal_ranks``.

    Args:
        rankings: Scores by id.
        weights: One per ranking, none negative, one positive.
    """
    fused: dict[str, float] = {}
    for scores, weight in zip(rankings, weights, strict=True):
        for name, score in min_max(scores).items():
            fused[name] = fused.get(name, 0.0) + weight * score
    return {name: min(score / sum(weights), 1.0) for name, score in fused.items()}


def min_max(scores: Mapping[str, float]) -> dict[str, float]:
    """Return ``(s - min) / (max - min)`` for each score; where all are equal, 1 for each."""
    if not scores:
        return {}
    low, high = min(scores.values()), max(scores.values())
    if low == high:
        return dict.fromkeys(scores, 1.0)
    return {name: (score - low) / (high - low) for name, score in scores.items()}
