"""Which passages fit into a number of tokens. Pure functions over token counts; knows no text and no documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rag_posfix.errors import PromptTooLongError

__all__ = ["FEWEST_TOKENS", "Selection", "choose", "truncate"]

FEWEST_TOKENS = 4
"""A passage is cut to no fewer text tokens than this: less says nothing."""

_BACKTRACK = 16
"""No character takes more tokens than this in a byte-level vocabulary, so a cut between characters is this near."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What a budget keeps.

    Attributes:
        kept: Ranks that fit, ascending; 0 is the most relevant passage.
        cut: Whether rank 0, alone, exceeds the budget and must be truncated. It is then the only one kept.
    """

    kept: tuple[int, ...]
    cut: bool = False


def choose(sizes: Iterable[int], budget: int, smallest: int = 1) -> Selection:
    """Keep the most relevant passages that fit together.

    A passage that does not fit is skipped; smaller ones of lower rank may still fit.

    Args:
        sizes: Tokens of each passage, the most relevant first. Read only as far as needed, so they may be counted
            on the way.
        budget: Most tokens that the kept passages may have together.
        smallest: No passage has fewer tokens than this: with less left, the search ends.
    """
    kept: list[int] = []
    left = budget
    for rank, size in enumerate(sizes):
        if size <= left:
            kept.append(rank)
            left -= size
        elif rank == 0:
            return Selection((0,), cut=True)
        if left < smallest:
            break
    return Selection(tuple(kept))


def truncate(token_ids: Sequence[int], limit: int, decode: Callable[[Sequence[int]], str]) -> tuple[int, ...]:
    """Return the longest beginning of ``token_ids`` of at most ``limit`` tokens that ends between two characters.

    Args:
        token_ids: The tokens of a text.
        limit: Most tokens to return.
        decode: Gives the text of tokens.

    Raises:
        PromptTooLongError: ``limit`` is below ``FEWEST_TOKENS``.
    """
    if limit >= len(token_ids):
        return tuple(token_ids)
    if limit < FEWEST_TOKENS:
        raise PromptTooLongError(
            f"{max(limit, 0)} tokens are left for the text of the most relevant passage, which has {len(token_ids)}; "
            f"at least {FEWEST_TOKENS} are needed: raise budget_tokens, lower max_new_tokens or shorten the question"
        )
    # A little more than the limit tells whether the last character is whole; the rest of the text cannot matter.
    beyond = decode(token_ids[: limit + _BACKTRACK])
    for stop in range(limit, max(limit - _BACKTRACK, 0), -1):
        if beyond.startswith(decode(token_ids[:stop])):
            return tuple(token_ids[:stop])
    return tuple(token_ids[:limit])
