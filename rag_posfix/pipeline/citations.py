"""Finds the spans of an answer that are quotes of passages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_WORD = re.compile(r"\w+")
MIN_WORDS = 3

MOST_CHARACTERS = 1_000_000
"""Characters of a passage that are searched: more than any context window holds."""


@dataclass(frozen=True, slots=True)
class Quote:
    """A span of the answer that passages contain word for word.

    Attributes:
        start: First character in the answer.
        end: Character after the last.
        passages: Indices of the passages that contain the span.
    """

    start: int
    end: int
    passages: tuple[int, ...]


class PassageWords:
    """The words of a passage, to find the characters of a quote in it. Cost: linear in the passage, once.

    Args:
        passage: The text of the passage; the first ``MOST_CHARACTERS`` are searched.
    """

    def __init__(self, passage: str) -> None:
        self._spans = [word.span() for word in _WORD.finditer(passage, 0, MOST_CHARACTERS)]
        self._text = _spaced(passage[start:end] for start, end in self._spans)

    def find(self, quote: str) -> tuple[int, int] | None:
        """Return the first characters of the passage with the words of ``quote``, as (start, end), or None.

        Case and punctuation are ignored, as by ``find_quotes``.
        """
        words = _WORD.findall(quote)
        at = self._text.find(_spaced(words)) if words else -1
        if at < 0:
            return None
        first = self._text.count(" ", 0, at)  # one space before each word
        return self._spans[first][0], self._spans[first + len(words) - 1][1]


def find_quotes(answer: str, passages: Sequence[str]) -> list[Quote]:
    """Return the longest spans of at least three words of ``answer`` that ``passages`` contain, left to right.

    Case and punctuation are ignored. An answer of fewer than three words is one span. Of a passage, the first
    ``MOST_CHARACTERS`` are searched.

    Cost: words of the answer squared at worst, times the passages.
    """
    words = list(_WORD.finditer(answer))
    # Lower case comes after the split: some capitals become two characters, of which one is no part of a word.
    texts = [_spaced(_WORD.findall(passage[:MOST_CHARACTERS])) for passage in passages]
    least = min(MIN_WORDS, len(words))
    quotes: list[Quote] = []
    at = 0
    while least and at + least <= len(words):
        best: tuple[int, tuple[int, ...]] = (0, ())
        for size in range(least, len(words) - at + 1):
            phrase = _spaced(word.group() for word in words[at : at + size])
            holders = tuple(i for i, text in enumerate(texts) if phrase in text)
            if not holders:
                break
            best = (size, holders)
        size, holders = best
        if size:
            quotes.append(Quote(words[at].start(), words[at + size - 1].end(), holders))
        at += max(size, 1)
    return quotes


def _spaced(words: Iterable[str]) -> str:
    """Return the words in lower case, with one space before, between and after them."""
    return " ".join(["", *map(str.lower, words), ""])
