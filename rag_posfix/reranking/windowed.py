"""What rerankers share that read several documents in one prompt: which of them are read, where they stand."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rag_posfix.assembly.documents import Candidate
from rag_posfix.assembly.layout import Frame, Passage
from rag_posfix.contracts.generator import PassageReader
from rag_posfix.reranking.deadline import check_time
from rag_posfix.reranking.generative import GenerativeReranker, ReadingReranker
from rag_posfix.reranking.reading import Readable, cut_to, encode_candidate, fair_limit
from rag_posfix.reranking.scoring import Scored

__all__ = ["WindowedReader", "WindowedReranker"]


@dataclass(frozen=True, slots=True)
class _Read:
    raw: float
    cut: bool


class WindowedReranker(GenerativeReranker):
    """Base of rerankers whose prompt holds several documents.

    Of more candidates than ``window``, the first are read together, and the others stay below them in their incoming
    order with score 0 and ``"read": False``: candidates come best first, and the authors of in-context reranking
    found one window better than several. With ``stride``, all are read, in overlapping windows from the last
    candidate to the first, each of which moves its best to the front; scores are then places,
    (n - place) / n, because raw scores of different windows cannot be compared.

    Documents that together exceed the context window are cut, the longest first, until they fit.

    Attributes:
        generator: The served model.
        top_n: How many passages to return, all if None.
        window: Documents that are read together at most.
        stride: By how many documents the next window is nearer to the first; None reads one window.
        max_document_tokens: Longer documents are read up to here.
        order: How a window's documents stand in the prompt. ``canonical``: by a hash of their content, so that the
            scores of what is read do not depend on the incoming order. ``given``: as they came.
    """

    window: int = Field(default=20, ge=2)
    stride: int | None = Field(default=None, ge=1)
    max_document_tokens: int = Field(default=512, ge=16)
    order: Literal["canonical", "given"] = "canonical"

    @model_validator(mode="after")
    def _windows_overlap(self) -> Self:
        if self.stride is not None and self.stride >= self.window:
            raise PydanticCustomError(
                "stride",
                "stride={stride} must be below window={window}: windows have to overlap",
                {"stride": self.stride, "window": self.window},
            )
        return self

    @abstractmethod
    def _frames(self, question: str, count: int) -> Sequence[Frame]:
        """Return what stands around a window's passages, for each prompt that is read."""

    @abstractmethod
    def _measure(self, frames: Sequence[Frame], passages: Sequence[Passage]) -> Sequence[float]:
        """Return the raw score of each passage of a window, in the order of the prompt; higher is better."""

    @abstractmethod
    def _relevance(self, raw: Sequence[float]) -> Sequence[float]:
        """Return the scores in [0, 1] of the passages of one window."""

    def _marked(self, passages: Sequence[Passage]) -> Sequence[Passage]:
        """Return the passages as they stand in the prompt."""
        return passages

    def _room_after(self, frames: Sequence[Frame], count: int) -> int:
        """Return how many tokens the passages of a window may take."""
        return self.generator.context_window - max(len(frame) for frame in frames)

    def _score(self, question: str, candidates: Sequence[Candidate]) -> Sequence[Scored]:
        if self.stride is None or len(candidates) <= self.window:
            read = self._read(question, candidates[: self.window])
            unread = [Scored(0.0)] * (len(candidates) - len(read))
            scores = self._relevance([one.raw for one in read])
            return [*(_scored(one, score) for one, score in zip(read, scores, strict=True)), *unread]
        places = list(range(len(candidates)))
        found: dict[int, _Read] = {}
        for start, stop in self._windows(len(candidates), self.stride):
            inside = places[start:stop]
            read = self._read(question, [candidates[index] for index in inside])
            found.update(zip(inside, read, strict=True))
            places[start:stop] = sorted(inside, key=lambda index: -found[index].raw)
        n = len(candidates)
        place_of = {index: place for place, index in enumerate(places)}
        return [_scored(found[index], (n - place_of[index]) / n) for index in range(n)]

    def _windows(self, count: int, stride: int) -> Iterator[tuple[int, int]]:
        """Yield first and last place, the last excluded, of each window, from the back."""
        start = count - self.window
        while start > 0:
            yield start, start + self.window
            start -= stride
        yield 0, self.window

    def _read(self, question: str, candidates: Sequence[Candidate]) -> list[_Read]:
        """Read one window; return what was found in the order of ``candidates``."""
        check_time()
        frames = self._frames(question, len(candidates))
        readables = self._fitted(frames, candidates)
        order = list(range(len(candidates)))
        if self.order == "canonical":
            order.sort(key=lambda index: candidates[index].key)
        passages = self._marked([readables[index].passage for index in order])
        raw = dict(zip(order, self._measure(frames, passages), strict=True))
        return [_Read(raw[index], readable.cut) for index, readable in enumerate(readables)]

    def _fitted(self, frames: Sequence[Frame], candidates: Sequence[Candidate]) -> list[Readable]:
        encoder = self.generator.encoder
        readables = [
            cut_to(encode_candidate(encoder, self._template, candidate), self.max_document_tokens, encoder)
            for candidate in candidates
        ]
        room = self._room_after(frames, len(candidates))
        limit = fair_limit([len(readable) for readable in readables], room)
        return [self._shortened(readable, limit) for readable in readables]

    def _shortened(self, readable: Readable, limit: int) -> Readable:
        shorter = cut_to(readable, limit, self.generator.encoder)
        return Readable(shorter.passage, cut=readable.cut or shorter.cut)


class WindowedReader(WindowedReranker, ReadingReranker):
    """A ``WindowedReranker`` that looks at what the model makes of documents while it reads them.

    Attributes: those of ``WindowedReranker``; ``generator`` must be an ``Engine``, or a ``BatchingGenerator`` of one.
    """

    generator: PassageReader


def _scored(one: _Read, score: float) -> Scored:
    return Scored(score, one.raw, {"long_document": "truncated"} if one.cut else {})
