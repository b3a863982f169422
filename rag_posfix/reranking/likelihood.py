"""Scores passages by how likely they make the question."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from rag_posfix.assembly.documents import Candidate
from rag_posfix.assembly.layout import Frame, open_frame
from rag_posfix.contracts.cache_salt import current_salt
from rag_posfix.errors import ConfigError
from rag_posfix.reranking.base import RERANKERS
from rag_posfix.reranking.deadline import check_time
from rag_posfix.reranking.generative import ReadingReranker
from rag_posfix.reranking.reading import Readable, cut_to, encode_candidate
from rag_posfix.reranking.scoring import Scored

__all__ = ["LikelihoodReranker"]

RESTRICTION = " We can get the answer to this question in the given documents."

MOST_TOKENS = 8192
"""Tokens of a batch, padding and suffixes included: bounds its memory."""


@RERANKERS.register("likelihood", aliases=("longllmlingua",))
class LikelihoodReranker(ReadingReranker):
    """Ask the model how likely each passage makes the question.

    Each passage is read alone, after the words that stand before passages in an answer's prompt, and followed by the
    question. A passage that the question could be about makes its words likely.

    Source: Jiang et al. (2024), LongLLMLingua, section 4.1, https://aclanthology.org/2024.acl-long.91
    Formula: r_k = (1 / N) sum_i log p(x_i | passage k, x_<i), over the tokens x of question and restriction (the
        paper's r_k is the negative). relevance_score = exp(r_k), the geometric mean probability of a token, in (0, 1].
    Differs from the paper: the served chat model and its prompt take the place of a small base model.
    Cost: tokens read: prefix once, each passage once, question and restriction once per passage. What the passage
        store holds is not read again, and answers with independent passages (``context_experts``, ...) find what was
        read here. Passages are read in batches; the deadline is looked at between two.
    Limits: any model. The score of a passage does not depend on the others, nor on their order.

    Attributes:
        generator: The served model; an ``Engine``, or a ``BatchingGenerator`` around one.
        top_n: How many passages to return, all if None.
        restriction: The sentence after the question that keeps the model to the documents; may be empty.
        batch_size: Passages per batch at most.
        max_document_tokens: Longer documents are read up to here (``long_document: "truncated"``); None is what the
            context window leaves.
    """

    name: ClassVar[str] = "likelihood"

    restriction: str = RESTRICTION
    batch_size: int = Field(default=16, ge=1)
    max_document_tokens: int | None = Field(default=None, ge=16)

    def _score(self, question: str, candidates: Sequence[Candidate]) -> Sequence[Scored]:
        frame = self._frame(question)
        readables = list(self._readables(frame, candidates))
        found: dict[int, float] = {}
        for batch in self._batches(readables, len(frame.suffix)):
            check_time()
            layout = frame.around([readables[index].passage for index in batch])
            found.update(zip(batch, self.generator.question_likelihood(layout, current_salt()), strict=True))
        return [
            Scored(
                math.exp(min(found[index], 0.0)),
                found[index],
                {"long_document": "truncated"} if readable.cut else {},
            )
            for index, readable in enumerate(readables)
        ]

    def _frame(self, question: str) -> Frame:
        """Return what stands around each passage: the prompt of an answer, up to the end of the restriction."""
        asked = question + self.restriction
        frame = open_frame(self.generator.encoder, self._template, asked, with_passages=True)
        if not len(frame.question):
            raise ConfigError(f"the question {question!r} has no tokens; ask something else")
        return replace(frame, suffix=frame.suffix[: frame.question.stop])

    def _readables(self, frame: Frame, candidates: Sequence[Candidate]) -> Iterator[Readable]:
        encoder, room = self.generator.encoder, self.generator.context_window - len(frame)
        limit = room if self.max_document_tokens is None else min(self.max_document_tokens, room)
        for index, candidate in enumerate(candidates):
            if index % self.batch_size == 0:
                check_time()
            yield cut_to(encode_candidate(encoder, self._template, candidate), limit, encoder)

    def _batches(self, readables: Sequence[Readable], suffix: int) -> Iterator[list[int]]:
        """Yield which passages are read together: of similar length, and by content, so that order has no part in it.

        In bfloat16 the last digits of a score depend on the batch.
        """
        batch: list[int] = []
        for index in sorted(range(len(readables)), key=lambda i: (len(readables[i]), readables[i].passage.key)):
            size = (len(readables[index]) + suffix) * (len(batch) + 1)  # sorted: the newest is the longest
            if batch and (len(batch) == self.batch_size or size > MOST_TOKENS):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch
