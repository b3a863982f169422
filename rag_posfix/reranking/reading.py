"""Documents in tokens for rerankers that read them with the served model: encoded, and cut where they do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rag_posfix.assembly.budget import truncate
from rag_posfix.assembly.documents import Candidate
from rag_posfix.assembly.layout import Passage, encode_passage
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.contracts.generator import TokenEncoder
from rag_posfix.errors import PromptTooLongError

__all__ = ["SMALLEST", "Readable", "cut_to", "encode_candidate", "fair_limit"]

SMALLEST = 16
"""A document is cut to no fewer tokens than this: less says nothing."""


@dataclass(frozen=True, slots=True)
class Readable:
    """A document in tokens.

    Attributes:
        passage: The tokens, heading and separator included.
        cut: Whether its end is missing.
    """

    passage: Passage
    cut: bool = False

    def __len__(self) -> int:
        return len(self.passage)


def encode_candidate(encoder: TokenEncoder, template: PromptTemplate, candidate: Candidate) -> Readable:
    """Return a document in the tokens that it has in the prompt of an answer: what is kept of it serves both."""
    return Readable(encode_passage(encoder, template, candidate.text, title=candidate.title))


def cut_to(readable: Readable, limit: int, encoder: TokenEncoder) -> Readable:
    """Return the beginning of a document, of at most ``limit`` tokens. Its key stays.

    Raises:
        PromptTooLongError: ``limit`` is below ``SMALLEST``.
    """
    if len(readable) <= limit:
        return readable
    if limit < SMALLEST:
        raise PromptTooLongError(
            f"{max(limit, 0)} tokens are left for each document, and at least {SMALLEST} are needed; rank fewer "
            "documents at a time (window), or shorten the question"
        )
    passage = readable.passage
    heading = passage.heading[: limit // 2]
    room = limit - len(heading) - len(passage.separator)
    return Readable(replace(passage, heading=heading, text=truncate(passage.text, room, encoder.decode)), cut=True)


def fair_limit(sizes: Sequence[int], room: int) -> int:
    """Return the largest length that all may have without exceeding ``room`` together: only the longest are cut.

    Formula: the largest m with sum_k min(size_k, m) <= room.
    """
    left = room
    ascending = sorted(sizes)
    for done, size in enumerate(ascending):
        share = left // (len(ascending) - done)
        if size > share:
            return share
        left -= size
    return max(sizes, default=0)
