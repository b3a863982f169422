"""Scores passages by the cosine of their embedding with the question's."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import ClassVar

from langchain_core.callbacks import Callbacks
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.assembly.documents import Candidate
from rag_posfix.errors import RerankingError
from rag_posfix.reranking.base import RERANKERS
from rag_posfix.reranking.candidates import checked_question, read_candidates
from rag_posfix.reranking.scoring import Scored, ScoringReranker
from rag_posfix.text import titled_text

__all__ = ["EmbeddingReranker"]

# The vector of one text differs by about 1e-7 with the batch that it was embedded in.
_SCORE_DECIMALS = 6


@RERANKERS.register("embedding")
class EmbeddingReranker(ScoringReranker):
    """Re-score passages with any embedding model.

    Useful after a retriever without scores of that kind (BM25, a web search), or with a larger embedding model
    than the index was built with. A passage without visible text scores 0.

    Source: Karpukhin et al. (2020), Dense Passage Retrieval, section 3, https://arxiv.org/abs/2004.04906
    Formula: relevance_score = the cosine of the vectors of question and passage (title and text); 0 where negative.
    Cost: tokens read, by the embedding model: each passage and the question once; nothing is kept between questions.
    Limits: what exceeds the embedding model's window is cut by it, and nobody says so.

    Attributes:
        embeddings: Any langchain embedding model; its vectors need not have length one.
        top_n: How many passages to return, all if None.
    """

    name: ClassVar[str] = "embedding"

    embeddings: Embeddings

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Do what ``compress_documents`` does with the model's asynchronous methods.

        Args:
            documents: What to score; left untouched.
            query: The question.
            callbacks: Not used; part of langchain's interface.
        """
        if not documents:
            return []
        question, candidates = checked_question(query), read_candidates(documents)
        scored: Sequence[Scored] = ()
        if candidates.distinct:
            texts = _texts(candidates.distinct)
            vectors = await self.embeddings.aembed_documents(texts)
            scored = _scored(candidates.distinct, texts, vectors, await self.embeddings.aembed_query(question))
        return self._ranked(documents, candidates, scored)

    def _score(self, question: str, candidates: Sequence[Candidate]) -> Sequence[Scored]:
        texts = _texts(candidates)
        vectors = self.embeddings.embed_documents(texts)
        return _scored(candidates, texts, vectors, self.embeddings.embed_query(question))


def _text(candidate: Candidate) -> str:
    return titled_text(candidate.title, candidate.text)


def _texts(candidates: Sequence[Candidate]) -> list[str]:
    """Return each text once, sorted: batches, and with them the last digits of scores, depend on content alone."""
    return sorted(set(map(_text, candidates)))


def _scored(
    candidates: Sequence[Candidate], texts: list[str], vectors: list[list[float]], query: list[float]
) -> list[Scored]:
    if len(vectors) != len(texts):
        raise RerankingError(f"the embedding model returned {len(vectors)} vectors for {len(texts)} texts")
    cosines = {text: _cosine(query, vector) for text, vector in zip(texts, vectors, strict=True)}
    each = (cosines[_text(candidate)] for candidate in candidates)
    return [Scored(min(max(cosine, 0.0), 1.0), cosine) for cosine in each]


def _cosine(query: list[float], vector: list[float]) -> float:
    """Return the cosine of two vectors, rounded; a zero vector is similar to nothing."""
    if len(query) != len(vector):
        raise RerankingError(f"question and passage have vectors of dimension {len(query)} and {len(vector)}")
    length = math.hypot(*query) * math.hypot(*vector)
    if not math.isfinite(length):
        raise RerankingError("the embedding model returned a value that is not finite; check its weights and dtype")
    if length == 0:
        return 0.0
    cosine = math.fsum(map(operator.mul, query, vector)) / length
    return round(cosine, _SCORE_DECIMALS)
