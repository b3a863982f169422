"""A question to several retrievers at once, and what they find as one ranking.

Knows only the role that its parts play.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Literal

from langchain_core.documents import Document
from pydantic import Field

from rag_posfix.contracts.generator import Retriever
from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.base import QuestionRetriever, checked_question
from rag_posfix.retrieval.fusion import reciprocal_ranks, weighted_scores
from rag_posfix.retrieval.index.records import copied, document_id

__all__ = ["HybridRetriever"]


class HybridRetriever(QuestionRetriever):
    """Returns what two or more retrievers find, as one ranking with ``relevance_score`` in [0, 1], ties by id.

    ``rank`` (reciprocal rank fusion) looks at places only, so that scores of any kind go together; 1 is a passage
    that is first everywhere, and scores fall slowly: ten places down everywhere is .86. ``score`` is the weighted mean
    of scores that are stretched to [0, 1] for each question and retriever; it keeps how much better the best are, and
    the last candidate of each retriever gets nothing from it. See ``fusion`` for formulas and sources.

    A passage that several find keeps the metadata of the first of them, and what the others add to it, such as
    ``bm25_score``. Retrievers are asked one after the other by ``retrieve``, together by ``aretrieve``.

    Attributes:
        retrievers: Two or more, each with ``retrieve(question, k)``.
        fusion: ``rank`` or ``score``.
        weights: One per retriever, none negative and one positive; equal if None.
        rank_constant: The constant of reciprocal rank fusion, at least 0; the paper's is 60.
        candidates: How many passages each retriever is asked for, ``k`` if that is more.
        k: How many passages ``invoke`` returns where the call names no ``k``.

    Raises:
        ValidationError: fewer than two retrievers, something else among them, weights that fit no mean, or another
            value outside of what is allowed (pydantic's, a ``ValueError``).
    """

    retrievers: Sequence[Any]
    fusion: Literal["rank", "score"] = "rank"
    weights: Sequence[float] | None = None
    rank_constant: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    candidates: int = Field(default=100, ge=1)

    def model_post_init(self, context: Any, /) -> None:
        """Check what pydantic does not, which then says so with its own ``ValidationError``, a ``ValueError``."""
        super().model_post_init(context)
        if len(self.retrievers) < 2:
            raise ConfigError(f"hybrid retrieval needs two or more retrievers, got {len(self.retrievers)}")
        for retriever in self.retrievers:
            if not isinstance(retriever, Retriever):
                raise ConfigError(
                    f"a {type(retriever).__name__} cannot be part of hybrid retrieval; it needs retrieve(question, k)"
                )
        weights = self._weights()
        usable = all(math.isfinite(weight) and weight >= 0 for weight in weights) and sum(weights) > 0
        if len(weights) != len(self.retrievers) or not usable:
            raise ConfigError(
                f"weights={weights!r} for {len(self.retrievers)} retrievers; give a number >= 0 for each, and one > 0"
            )

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents for ``question``, best first.

        Args:
            question: Must hold a visible character.
            k: How many at most.

        Raises:
            ConfigError: the question is empty, or ``k`` is below 1.
            RetrievalError: one of the retrievers failed.
        """
        question = checked_question(question, k)
        width = max(k, self.candidates)
        return self._fused([retriever.retrieve(question, width) for retriever in self.retrievers], k)

    async def aretrieve(self, question: str, k: int) -> list[Document]:
        """Do what ``retrieve`` does without blocking the event loop.

        Args:
            question: Must hold a visible character.
            k: How many at most.
        """
        question = checked_question(question, k)
        width = max(k, self.candidates)
        calls = (
            retriever.aretrieve(question, width)
            if hasattr(retriever, "aretrieve")
            else asyncio.to_thread(retriever.retrieve, question, width)
            for retriever in self.retrievers
        )
        return self._fused(await asyncio.gather(*calls), k)

    def _weights(self) -> list[float]:
        return [1.0] * len(self.retrievers) if self.weights is None else [float(weight) for weight in self.weights]

    def _fused(self, found: Sequence[Sequence[Document]], k: int) -> list[Document]:
        rankings = [_scores(documents) for documents in found]
        if self.fusion == "rank":
            fused = reciprocal_ranks([list(ranking) for ranking in rankings], self._weights(), self.rank_constant)
        else:
            fused = weighted_scores(rankings, self._weights())
        best = sorted(fused, key=lambda name: (-fused[name], name))[:k]
        return [_merged(name, found, fused[name]) for name in best]


def _scores(documents: Sequence[Document]) -> dict[str, float]:
    """Return the relevance of each document by id, best first; of two with one id the better one counts."""
    scores: dict[str, float] = {}
    for document in documents:
        scores.setdefault(document_id(document), float(document.metadata["relevance_score"]))
    return scores


def _merged(name: str, found: Sequence[Sequence[Document]], score: float) -> Document:
    copies = [copied(document) for documents in found for document in documents if document_id(document) == name]
    first = copies[0]
    for other in copies[1:]:
        first.metadata = {**other.metadata, **first.metadata}
    first.id = name
    first.metadata["relevance_score"] = score
    return first
