"""Attributes each sentence of an answer to a passage, by the attention to passages during its generation."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from rag_posfix.contracts.request import TokenSource

_SENTENCE = re.compile(r"\S.*?(?:[.!?\u2026](?=\s)|(?=\n)|$|[\u3002\uff01\uff1f])", re.DOTALL)

SHARE = 1 / 3
"""A passage dominates a sentence with at least this share of the attention to passages, ..."""
LEAD = 2.0
"""... if that is at least so many times the share of every other passage."""


@dataclass(frozen=True, slots=True)
class SentenceAttribution:
    """A sentence of the answer and the passages' shares in it.

    Attributes:
        start: First character in the answer.
        end: Character after the last.
        shares: Mean share of each passage over the sentence's tokens, in the order of the layout.
    """

    start: int
    end: int
    shares: tuple[float, ...]


def attribute_sentences(answer: str, sources: Sequence[TokenSource]) -> list[SentenceAttribution]:
    """Return the sentences of ``answer`` with the mean shares of their tokens, left to right.

    A token belongs to the sentence that contains its last character. White space and tokens without text belong to no
    sentence. A sentence without tokens is left out.

    Args:
        sources: The shares of the passages in each token, in the order of generation.
    """
    spans = [(found.start(), found.start() + len(found.group().rstrip())) for found in _SENTENCE.finditer(answer)]
    ends = [end for _, end in spans]
    tokens: list[list[tuple[float, ...]]] = [[] for _ in spans]
    written = 0
    for source in sources:
        text = answer[written : source.end].rstrip()
        at = bisect_left(ends, written + len(text))
        if text and at < len(spans) and spans[at][0] < written + len(text):
            tokens[at].append(source.shares)
        written = max(written, source.end)
    return [
        SentenceAttribution(start, end, tuple(sum(column) / len(rows) for column in zip(*rows, strict=True)))
        for (start, end), rows in zip(spans, tokens, strict=True)
        if rows
    ]


def dominant(shares: Sequence[float]) -> int | None:
    """Return the passage that dominates, by ``SHARE`` and ``LEAD``; None if none does.

    Args:
        shares: One per passage.
    """
    if not shares:
        return None
    first = max(range(len(shares)), key=shares.__getitem__)
    others = max((share for index, share in enumerate(shares) if index != first), default=0.0)
    return first if shares[first] >= SHARE and shares[first] >= LEAD * others else None
