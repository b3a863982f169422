"""Which passages fit into a number of tokens. Pure functions over token counts; knows no text and no documents."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rag_posfix.errors import ConfigError, PromptTooLongError

__all__ = ["FEWEST_TOKENS", "Overflow", "PassageBudget", "Selection", "choose", "truncate", "truncate_at_sentence"]

FEWEST_TOKENS = 4
"""A passage is cut to no fewer text tokens than this: less says nothing."""

_BACKTRACK = 16
"""No character takes more tokens than this in a byte-level vocabulary, so a cut between characters is this near."""


_SENTENCE_END = re.compile(
    r"""[.!?\u2026\u3002\uff01\uff1f]["'\u201d\u2019\u00bb)\]]*(?=\s|$)"""
    r"|[\u3002\uff01\uff1f](?=\S)"  # those of Chinese and Japanese need no space after them
)

Overflow = Literal["drop", "truncate", "error"]
"""What happens to a passage that is longer than it may be."""


@dataclass(frozen=True, slots=True)
class PassageBudget:
    """How many tokens each passage may have, by its rank, and what happens to a longer one.

    Source: the dynamic budget of LongLLMLingua (2024), section 4.3, https://arxiv.org/abs/2310.06839: it keeps the
        share clip((1 - 2 k / K) d + t, 0, 1) of the document of rank k.
    Formula: limit(r) = floor(tokens (1 + shrink (1 - 2 r / (K - 1)))), r = 0 .. K - 1, then the last one's; K is how
        many passages of ``tokens`` tokens fit into the whole budget, at most as many as there are. From
        (1 + shrink) tokens for the best to (1 - shrink) tokens for the last; together K times ``tokens``.
    Differs from the paper: a limit in tokens instead of a share, and no compression: what is over is left out or cut.
        By rank, not by place: so the passages hold the same text in every order, and what does not depend on order
        still does not. Under the order ``relevance`` rank and place are the same.

    Attributes:
        tokens: What a passage may have on average, heading and separator included; None sets no limit of its own.
        shrink: How much less late ranks may have, 0 to 1.
        overflow: ``drop`` leaves a longer passage out, ``truncate`` cuts it at the end of a sentence, or between two
            characters where no sentence ends, ``error`` refuses the prompt. The most relevant passage is cut where
            others are left out, since a prompt without it would be of no use.
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
            raise ConfigError(f"passage budget: shrink={self.shrink} shrinks tokens; say how many a passage may have")
        if self.overflow not in get_args(Overflow):
            raise ConfigError(
                f"passage budget: overflow={self.overflow!r} must be one of {', '.join(get_args(Overflow))}"
            )

    def limits(self, count: int, budget: int) -> Callable[[int], int]:
        """Return the function from a rank to the most tokens of its passage.

        Args:
            count: How many passages there are.
            budget: Most tokens that they may have together.
        """
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
    """What a budget keeps.

    Attributes:
        kept: Ranks that fit, or that were cut to fit, ascending; 0 is the most relevant passage.
        cut: Those of them that were cut.
        refused: The first rank that is too long and how many tokens it may have, where nothing is left out.
    """

    kept: tuple[int, ...]
    cut: tuple[int, ...] = ()
    refused: tuple[int, int] | None = None


def choose(
    sizes: Iterable[int],
    budget: int,
    smallest: int = 1,
    *,
    limit: Callable[[int], int] | None = None,
    overflow: Overflow = "drop",
    cut: Callable[[int, int], int] = lambda rank, allowed: allowed,
) -> Selection:
    """Keep the most relevant passages that fit together.

    A passage that does not fit is skipped, where it is not cut; smaller ones of lower rank may still fit.

    Args:
        sizes: Tokens of each passage, the most relevant first. Read only as far as needed, so they may be counted
            on the way.
        budget: Most tokens that the kept passages may have together.
        smallest: No passage has fewer tokens than this: with less left, the search ends.
        limit: Most tokens of the passage of a rank; none if None.
        overflow: What happens to a passage that does not fit.
        cut: Cuts the passage of a rank to at most so many tokens and returns how many it has now; 0 if it cannot.
    """
    kept: list[int] = []
    shortened: list[int] = []
    left = budget
    for rank, size in enumerate(sizes):
        allowed = left if limit is None else min(left, limit(rank))
        if size <= allowed:
            kept.append(rank)
            left -= size
        elif overflow == "error":
            return Selection(tuple(kept), refused=(rank, allowed))
        elif overflow == "truncate" or rank == 0:
            now = cut(rank, allowed)
            if now:
                kept.append(rank)
                shortened.append(rank)
            left -= now
            if allowed == left + now:  # cut to all that was left
                break
        if left < smallest:
            break
    return Selection(tuple(kept), tuple(shortened))


def truncate_at_sentence(
    token_ids: Sequence[int], limit: int, decode: Callable[[Sequence[int]], str]
) -> tuple[int, ...]:
    """Return the longest beginning of ``token_ids`` of at most ``limit`` tokens that ends with a sentence.

    A sentence ends with a full stop, a question or an exclamation mark before white space or the end of the text.
    Where none ends within the limit, or only after fewer than ``FEWEST_TOKENS`` tokens, as ``truncate``.

    Args:
        token_ids: The tokens of a text.
        limit: Most tokens to return.
        decode: Gives the text of tokens.

    Raises:
        PromptTooLongError: ``limit`` is below ``FEWEST_TOKENS``.
    """
    cut = truncate(token_ids, limit, decode)
    if len(cut) == len(token_ids):
        return cut
    text = decode(cut)
    beyond = decode(token_ids[: len(cut) + _BACKTRACK])  # tells whether "3." is a sentence's end or 3.5 begins
    for found in reversed(list(_SENTENCE_END.finditer(beyond))):
        if found.end() > len(text):
            continue
        low = _fewest(cut, found.end(), decode)
        if low >= FEWEST_TOKENS and decode(cut[:low]).rstrip() == text[: found.end()]:
            return cut[:low]
    return cut


def _fewest(token_ids: Sequence[int], length: int, decode: Callable[[Sequence[int]], str]) -> int:
    """Return the fewest tokens that hold ``length`` whole characters; the last may hold what follows them too."""
    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high) // 2
        whole = len(decode(token_ids[:middle]).rstrip("\ufffd"))  # half a character is none
        low, high = (low, middle) if whole >= length else (middle + 1, high)
    return low


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
