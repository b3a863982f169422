"""Scores passages by the cosine of their embedding and the question's."""

from __future__ import annotations

import asyncio
import math
import operator
from collections.abc import Callable, Sequence
from typing import ClassVar

from langchain_core.callbacks import Callbacks
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.assembly.documents import CheckedDocument
from rag_posfix.errors import RerankingError
from rag_posfix.reranking.base import RERANKERS, DocumentScore, ScoringReranker, distinct_documents
from rag_posfix.text import checked_question, titled_text

# The vector of one text differs by about 1e-7 with the batch that it was embedded in.
_SCORE_DECIMALS = 6


@RERANKERS.register("embedding")
class EmbeddingReranker(ScoringReranker):
    """Score passages with an embedding model.

    Useful after a retriever without embeddings (BM25, a web search), or with a larger embedding model than that of the
    index.

    Source: Karpukhin et al. (2020), Dense Passage Retrieval, section 3, https://arxiv.org/abs/2004.04906
    Formula: relevance_score = the cosine of the vectors of question and passage (title and text), or 0 if negative.
    Cost: tokens read, by the embedding model: each passage and the question once; nothing is cached.
    Limits: of a passage, what the embedding model reads at a time.

    Attributes:
        embeddings: Any langchain embedding model; its vectors need not have length one.
        top_n: Number of passages to return, all if None.
    """

    name: ClassVar[str] = "embedding"

    embeddings: Embeddings

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Do what ``compress_documents`` does with the model's asynchronous methods."""
        if not documents:
            return []
        question, distinct = checked_question(query), distinct_documents(documents)
        scores: Sequence[DocumentScore] = ()
        if distinct.documents:
            texts = _texts(distinct.documents)
            beginnings = getattr(self.embeddings, "embed_beginnings", None)
            vectors = await (
                self.embeddings.aembed_documents(texts) if beginnings is None else asyncio.to_thread(beginnings, texts)
            )
            scores = _scores(distinct.documents, texts, vectors, await self.embeddings.aembed_query(question))
        return self._ranked(documents, distinct, scores)

    def _score(self, question: str, documents: Sequence[CheckedDocument]) -> Sequence[DocumentScore]:
        texts = _texts(documents)
        embed: Callable[[list[str]], list[list[float]]]
        embed = getattr(self.embeddings, "embed_beginnings", self.embeddings.embed_documents)
        vectors = embed(texts)
        return _scores(documents, texts, vectors, self.embeddings.embed_query(question))


def _text(document: CheckedDocument) -> str:
    return titled_text(document.title, document.text)


def _texts(documents: Sequence[CheckedDocument]) -> list[str]:
    """Return each text once, sorted: the last digits of a vector depend on its batch, so batches must not vary."""
    return sorted(set(map(_text, documents)))


def _scores(
    documents: Sequence[CheckedDocument], texts: list[str], vectors: list[list[float]], query: list[float]
) -> list[DocumentScore]:
    if len(vectors) != len(texts):
        raise RerankingError(f"the embedding model returned {len(vectors)} vectors for {len(texts)} texts")
    cosines = {text: _cosine(query, vector) for text, vector in zip(texts, vectors, strict=True)}
    ordered = (cosines[_text(document)] for document in documents)
    return [DocumentScore(min(max(cosine, 0.0), 1.0), cosine) for cosine in ordered]


def _cosine(query: list[float], vector: list[float]) -> float:
    """Return the cosine of two vectors, rounded; 0 if a vector is zero."""
    if len(query) != len(vector):
        raise RerankingError(f"question and passage have vectors of dimension {len(query)} and {len(vector)}")
    length = math.hypot(*query) * math.hypot(*vector)
    if not math.isfinite(length):
        raise RerankingError("the embedding model returned a value that is not finite; check its weights and dtype")
    if length == 0:
        return 0.0
    cosine = math.fsum(map(operator.mul, query, vector)) / length
    return round(cosine, _SCORE_DECIMALS)
