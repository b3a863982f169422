"""Selects the passages that fit into a token budget, and cuts long ones. Knows tokens, not documents."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rag_posfix.errors import ConfigError, PromptTooLongError
from rag_posfix.text import REPLACEMENT

FEWEST_TOKENS = 4
"""A passage is never cut to fewer text tokens than this."""

_BACKTRACK = 16
"""Upper bound of the tokens of one character in a byte-level vocabulary, and so of the distance to a boundary."""


_SENTENCE_END = re.compile(
    r"""[.!?\u2026\u3002\uff01\uff1f]["'\u201d\u2019\u00bb)\]]*(?=\s|$)"""
    r"|[\u3002\uff01\uff1f](?=\S)"  # Chinese and Japanese marks are not followed by a space
)

Overflow = Literal["drop", "truncate", "error"]
"""What happens to a passage that exceeds its limit."""


@dataclass(frozen=True, slots=True)
class PassageBudget:
    """A token limit for each passage, by its relevance rank, and what happens to a longer passage.

    Source: the dynamic budget of LongLLMLingua (2024), section 4.3, https://arxiv.org/abs/2310.06839: it keeps the
        fraction clip((1 - 2 k / K) d + t, 0, 1) of the document of rank k.
    Formula: limit(r) = floor(tokens (1 + shrink (1 - 2 r / (K - 1)))), r = 0 .. K - 1; limit(K - 1) for later ranks.
        K is the number of passages of ``tokens`` tokens that fit into the whole budget, at most the number of
        passages. The best passage may have (1 + shrink) ``tokens``, the last (1 - shrink) ``tokens``, all together K
        times ``tokens``.
    Differs from the paper: the limit is a number of tokens instead of a fraction, and nothing is compressed: a longer
        passage is left out or cut. Limits follow the rank, not the position, so that a passage has the same text in
        every order.

    Attributes:
        tokens: Average limit of a passage, heading and separator included; None for no limit per passage.
        shrink: How much the limit falls from the best to the last rank, 0 to 1.
        overflow: ``drop`` leaves a longer passage out, ``truncate`` cuts it at the end of a sentence, or between two
            characters if no sentence ends within the limit, ``error`` raises. ``drop`` cuts the most relevant passage
            instead of leaving it out.
    """

    tokens: int | None = None
    shrink: float = 0.0
    overflow: Overflow = "drop"

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"passage budget: tokens={self.tokens} must be >= 1, or None for no limit")
        if not 0.0 <= self.shrink <= 1.0:
            raise ConfigError(f"passage budget: shrink={self.shrink} must be between 0 and 1")
        if self.tokens is None and self.shrink:
            raise ConfigError(f"passage budget: shrink={self.shrink} needs tokens; say how many a passage may have")
        if self.overflow not in get_args(Overflow):
            raise ConfigError(
                f"passage budget: overflow={self.overflow!r} must be one of {', '.join(get_args(Overflow))}"
            )

    def limits(self, count: int, budget: int) -> Callable[[int], int]:
        """Return a function from a rank to the token limit of its passage."""
        tokens = self.tokens
        if tokens is None:
            return lambda rank: budget
        last = max(min(count, budget // tokens) - 1, 0)

        def limit(rank: int) -> int:
            slope = 1 - 2 * min(rank, last) / last if last else 0.0
            return math.floor(tokens * (1 + self.shrink * slope) + 1e-9)

        return limit


@dataclass(frozen=True, slots=True)
class Selection:
    """The passages that a budget keeps, by relevance rank; 0 is the most relevant passage.

    Attributes:
        selected: Ranks of the selected passages, ascending.
        cut: Ranks of selected passages that were cut.
        too_long: With ``overflow="error"``, the first rank that is too long, and its limit; else None.
    """

    selected: tuple[int, ...]
    cut: tuple[int, ...] = ()
    too_long: tuple[int, int] | None = None


def select_passages(
    sizes: Iterable[int],
    budget: int,
    smallest: int = 1,
    *,
    limit: Callable[[int], int] | None = None,
    overflow: Overflow = "drop",
    cut: Callable[[int, int], int] = lambda rank, allowed: allowed,
) -> Selection:
    """Select the most relevant passages that fit together.

    A passage that does not fit and is not cut is skipped; a shorter passage of lower rank may still fit.

    Args:
        sizes: Number of tokens of each passage, the most relevant first. Consumed only as far as needed, so that
            passages may be tokenised lazily.
        budget: Token limit of all kept passages together.
        smallest: Lower bound of the size of a passage: with fewer tokens left, the search ends.
        limit: Token limit of the passage of a rank; no limit if None.
        overflow: What happens to a passage that does not fit.
        cut: Cuts the passage of a rank to at most the given number of tokens and returns its new size; 0 if it cannot.
    """
    selected: list[int] = []
    shortened: list[int] = []
    left = budget
    for rank, size in enumerate(sizes):
        allowed = left if limit is None else min(left, limit(rank))
        if size <= allowed:
            selected.append(rank)
            left -= size
        elif overflow == "error":
            return Selection(tuple(selected), too_long=(rank, allowed))
        elif overflow == "truncate" or rank == 0:
            new_size = cut(rank, allowed)
            if new_size:
                selected.append(rank)
                shortened.append(rank)
            left -= new_size
            if allowed == left + new_size:  # the passage was cut to the remaining budget
                break
        if left < smallest:
            break
    return Selection(tuple(selected), tuple(shortened))


def truncate_at_sentence(
    token_ids: Sequence[int], limit: int, decode: Callable[[Sequence[int]], str]
) -> tuple[int, ...]:
    """Return the longest prefix of ``token_ids`` of at most ``limit`` tokens that ends with a sentence.

    A sentence ends with a full stop, a question or an exclamation mark before white space or the end of the text. If
    none ends within the limit, or only after fewer than ``FEWEST_TOKENS`` tokens, do what ``truncate`` does.

    Raises:
        PromptTooLongError: ``limit`` is below ``FEWEST_TOKENS``.
    """
    cut = truncate(token_ids, limit, decode)
    if len(cut) == len(token_ids):
        return cut
    text = decode(cut)
    beyond = decode(token_ids[: len(cut) + _BACKTRACK])  # distinguishes "3." at a sentence's end from "3.5"
    for match in reversed(list(_SENTENCE_END.finditer(beyond))):
        if match.end() > len(text):
            continue
        low = _count_min_tokens(cut, match.end(), decode)
        if low >= FEWEST_TOKENS and decode(cut[:low]).rstrip() == text[: match.end()]:
            return cut[:low]
    return cut


def _count_min_tokens(token_ids: Sequence[int], length: int, decode: Callable[[Sequence[int]], str]) -> int:
    """Return the smallest number of tokens whose text has at least ``length`` complete characters."""
    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high) // 2
        n_complete = len(decode(token_ids[:middle]).rstrip(REPLACEMENT))  # without an incomplete character
        low, high = (low, middle) if n_complete >= length else (middle + 1, high)
    return low


def truncate(token_ids: Sequence[int], limit: int, decode: Callable[[Sequence[int]], str]) -> tuple[int, ...]:
    """Return the longest prefix of ``token_ids`` of at most ``limit`` tokens that ends between two characters.

    Raises:
        PromptTooLongError: ``limit`` is below ``FEWEST_TOKENS``.
    """
    if limit >= len(token_ids):
        return tuple(token_ids)
    if limit < FEWEST_TOKENS:
        raise PromptTooLongError(
            f"{max(limit, 0)} tokens are left for the text of the most relevant passage, which has {len(token_ids)}; "
            f"at least {FEWEST_TOKENS} are needed: raise budget_tokens or the tokens of a passage, lower "
            "max_new_tokens, or shorten the question or the title"
        )
    beyond = ""
    # Up to the next boundary between characters: with a cut one, some decoders lose the whole run of bytes before it.
    for end in range(limit, limit + _BACKTRACK + 1):
        beyond = decode(token_ids[:end])
        if not beyond.endswith(REPLACEMENT):
            break
    for stop in range(limit, max(limit - _BACKTRACK, 0), -1):
        if beyond.startswith(decode(token_ids[:stop])):
            return tuple(token_ids[:stop])
    return tuple(token_ids[:limit])
