"""Citations: spans of an answer that are quotes of passages, and sentences that one passage's attention dominates."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rag_posfix.contracts.request import TokenSource

_WORD = re.compile(r"\w+")
MIN_WORDS = 3

MOST_CHARACTERS = 1_000_000
"""Characters of a passage that are searched: more than any context window holds."""

_SENTENCE = re.compile(r"\S.*?(?:[.!?\u2026](?=\s)|(?=\n)|$|[\u3002\uff01\uff1f])", re.DOTALL)

SHARE = 1 / 3
"""A passage dominates a sentence with at least this share of the attention to passages, ..."""
LEAD = 2.0
"""... if that is at least this many times the share of every other passage."""


@dataclass(frozen=True, slots=True)
class Quote:
    """A span of the answer, from ``start`` to before ``end``, that ``passages`` (indices) contain word for word."""

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
        self._text = _join_words(passage[start:end] for start, end in self._spans)

    def find(self, quote: str) -> tuple[int, int] | None:
        """Return the first characters of the passage with the words of ``quote``, as (start, end), or None.

        Case and punctuation are ignored, as by ``find_quotes``.
        """
        words = _WORD.findall(quote)
        position = self._text.find(_join_words(words)) if words else -1
        if position < 0:
            return None
        first = self._text.count(" ", 0, position)  # one space before each word
        return self._spans[first][0], self._spans[first + len(words) - 1][1]


def find_quotes(answer: str, passages: Sequence[str]) -> list[Quote]:
    """Return the longest spans of at least three words of ``answer`` that ``passages`` contain, left to right.

    Case and punctuation are ignored. An answer of fewer than three words is one span. Of a passage, the first
    ``MOST_CHARACTERS`` are searched.

    Cost: words of the answer squared at worst, times the passages.
    """
    words = list(_WORD.finditer(answer))
    # Lower case comes after the split: some capitals become two characters, one of them outside of a word.
    texts = [_join_words(_WORD.findall(passage[:MOST_CHARACTERS])) for passage in passages]
    min_words = min(MIN_WORDS, len(words))
    quotes: list[Quote] = []
    first = 0
    while min_words and first + min_words <= len(words):
        length = 0
        passages_with_it: tuple[int, ...] = ()
        for size in range(min_words, len(words) - first + 1):
            phrase = _join_words(word.group() for word in words[first : first + size])
            holders = tuple(index for index, text in enumerate(texts) if phrase in text)
            if not holders:
                break
            length, passages_with_it = size, holders
        if length:
            quotes.append(Quote(words[first].start(), words[first + length - 1].end(), passages_with_it))
        first += max(length, 1)
    return quotes


@dataclass(frozen=True, slots=True)
class SentenceAttribution:
    """A sentence of the answer, from ``start`` to before ``end``, and the mean share of each passage in its tokens."""

    start: int
    end: int
    shares: tuple[float, ...]


def attribute_sentences(answer: str, sources: Sequence[TokenSource]) -> list[SentenceAttribution]:
    """Return the sentences of ``answer`` with the mean shares of their tokens, left to right.

    A token belongs to the sentence that contains its last character. White space and tokens without text belong to no
    sentence. A sentence without tokens is left out.
    """
    spans = [(match.start(), match.start() + len(match.group().rstrip())) for match in _SENTENCE.finditer(answer)]
    ends = [end for _, end in spans]
    tokens: list[list[tuple[float, ...]]] = [[] for _ in spans]
    written = 0
    for source in sources:
        text = answer[written : source.end].rstrip()
        index = bisect_left(ends, written + len(text))
        if text and index < len(spans) and spans[index][0] < written + len(text):
            tokens[index].append(source.shares)
        written = max(written, source.end)
    return [
        SentenceAttribution(start, end, tuple(sum(column) / len(rows) for column in zip(*rows, strict=True)))
        for (start, end), rows in zip(spans, tokens, strict=True)
        if rows
    ]


def dominant(shares: Sequence[float]) -> int | None:
    """Return the passage that dominates, by ``SHARE`` and ``LEAD``; None if none does."""
    if not shares:
        return None
    first = max(range(len(shares)), key=shares.__getitem__)
    runner_up = max((share for index, share in enumerate(shares) if index != first), default=0.0)
    return first if shares[first] >= SHARE and shares[first] >= LEAD * runner_up else None


def _join_words(words: Iterable[str]) -> str:
    """Return the words in lower case, with one space before, between and after them."""
    return " ".join(["", *map(str.lower, words), ""])
