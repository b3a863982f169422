"""Converts log-probabilities of tokens to JSON types and back, for cache entries. Bytes are hexadecimal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rag_posfix.contracts.request import ScoredToken, TokenScore


def stored_scores(scored: Sequence[ScoredToken]) -> list[Any]:
    """Return ``[start, [bytes, log-probability], [[bytes, log-probability], ...]]`` for each token."""
    return [[one.start, _pair(one.token), [_pair(other) for other in one.top]] for one in scored]


def are_scores(stored: Any) -> bool:
    """Return whether ``stored`` has the form that ``stored_scores`` writes."""
    return isinstance(stored, list) and all(_is_scored(one) for one in stored)


def scores_from(stored: Sequence[Any]) -> tuple[ScoredToken, ...]:
    """Return what ``stored_scores`` was given; ``are_scores`` must hold."""
    return tuple(
        ScoredToken(_score(token), start, tuple(_score(other) for other in others)) for start, token, others in stored
    )


def _pair(score: TokenScore) -> list[Any]:
    return [score.data.hex(), score.log_prob]


def _score(pair: Sequence[Any]) -> TokenScore:
    return TokenScore(bytes.fromhex(pair[0]), pair[1])


def _is_scored(one: Any) -> bool:
    if not isinstance(one, list) or len(one) != 3 or not isinstance(one[0], int) or not isinstance(one[2], list):
        return False
    return all(_is_pair(pair) for pair in (one[1], *one[2]))


def _is_pair(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
        return False
    try:
        bytes.fromhex(pair[0])
    except ValueError:
        return False
    return pair[1] is None or isinstance(pair[1], int | float)
