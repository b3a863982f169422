"""A question, its answers and the segments that the answer depends on; and what makes such pairs."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Segment:
    """A short text with the title of what it is from.

    Attributes:
        title: The title; may be empty.
        text: The text.
    """

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A question that its segments answer, and nothing else does.

    Attributes:
        question: The question.
        answers: Accepted answers; the first is trained on.
        segments: What the answer depends on, all of them.
        around: Segments that stand around it before any others do.
    """

    question: str
    answers: tuple[str, ...]
    segments: tuple[Segment, ...]
    around: tuple[Segment, ...] = ()


class PairSource(Protocol):
    """Makes pairs, and segments that may stand around them. Equal generators give equal results."""

    @property
    def name(self) -> str:
        """Name in rows and statistics."""

    def pair(self, index: int, random: Random, segments: int) -> Pair | None:
        """Return the pair of a sample, or None if the draw gave no usable one.

        Args:
            index: Which pair of this source, from 0.
            segments: How many segments the answer should depend on, if this source can choose.
        """

    def filler(self, random: Random) -> Segment:
        """Return a segment that may stand around any pair of this source."""


def drawn(*parts: object) -> Random:
    """Return a generator that these values alone decide, in every process."""
    return Random(":".join(map(str, parts)))  # a string is hashed by SHA-512, not by hash()
