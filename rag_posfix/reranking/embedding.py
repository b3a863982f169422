"""Scores passages by the cosine of their embedding with the question's."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import Embeddings
from pydantic import ConfigDict, Field

from rag_posfix.errors import ConfigError, RerankingError
from rag_posfix.reranking.base import RERANKERS, ranked_copies
from rag_posfix.reranking.candidates import read_candidates
from rag_posfix.text import clean_text, titled_text

__all__ = ["EmbeddingReranker"]

# The vector of one text differs by about 1e-7 with the batch that it was embedded in.
_SCORE_DECIMALS = 6


@RERANKERS.register("embedding")
class EmbeddingReranker(BaseDocumentCompressor):
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

    model_config = ConfigDict(arbitrary_types_allowed=True)

    embeddings: Embeddings
    top_n: int | None = Field(default=None, ge=1)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return scored copies of ``documents``, best first; equal scores keep the given order.

        Args:
            documents: What to score; left untouched.
            query: The question.
            callbacks: Not used; part of langchain's interface.

        Raises:
            ConfigError: the question is empty, or a document is malformed.
            RerankingError: the embedding model returned unusable vectors.
        """
        if not documents:
            return []
        query = _checked(query)
        texts = _distinct_texts(documents)
        vectors = self.embeddings.embed_documents(texts) if texts else []
        return self._ranked(documents, texts, vectors, self.embeddings.embed_query(query) if texts else [])

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
        query = _checked(query)
        texts = _distinct_texts(documents)
        vectors = await self.embeddings.aembed_documents(texts) if texts else []
        return self._ranked(documents, texts, vectors, await self.embeddings.aembed_query(query) if texts else [])

    def _ranked(
        self, documents: Sequence[Document], texts: list[str], vectors: list[list[float]], query: list[float]
    ) -> list[Document]:
        if len(vectors) != len(texts):
            raise RerankingError(f"the embedding model returned {len(vectors)} vectors for {len(texts)} texts")
        scores = {text: _relevance(query, vector) for text, vector in zip(texts, vectors, strict=True)}
        return ranked_copies(documents, [scores.get(_text(document), 0.0) for document in documents], self.top_n)


def _checked(query: str) -> str:
    if not query.strip():
        raise ConfigError(f"the question is empty ({query!r}); pass a question with at least one visible character")
    return clean_text(query)


def _text(document: Document) -> str:
    # Built without validation, a Document may hold None in either.
    title = document.metadata.get("title") if document.metadata else None
    return clean_text(titled_text(title, document.page_content or ""))


def _distinct_texts(documents: Sequence[Document]) -> list[str]:
    """Return each text once, sorted: batches, and with them the last digits of scores, depend on content alone."""
    read_candidates(documents)  # which checks them
    return sorted({text for text in map(_text, documents) if text.strip()})


def _relevance(query: list[float], vector: list[float]) -> float:
    """Return the cosine of two vectors, negative values as 0; a zero vector is similar to nothing."""
    if len(query) != len(vector):
        raise RerankingError(f"question and passage have vectors of dimension {len(query)} and {len(vector)}")
    length = math.hypot(*query) * math.hypot(*vector)
    if not math.isfinite(length):
        raise RerankingError("the embedding model returned a value that is not finite; check its weights and dtype")
    if length == 0:
        return 0.0
    cosine = math.fsum(map(operator.mul, query, vector)) / length
    return min(max(round(cosine, _SCORE_DECIMALS), 0.0), 1.0)
