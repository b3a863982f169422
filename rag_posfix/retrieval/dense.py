"""A question to scored passages, over any langchain vector store.

Knows nothing of how passages are stored or embedded.
"""

from __future__ import annotations

from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from rag_posfix.retrieval.base import QuestionRetriever, checked_question
from rag_posfix.retrieval.index.records import document_id
from rag_posfix.retrieval.vectors import cosine_relevance

__all__ = ["PassageRetriever"]


class PassageRetriever(QuestionRetriever):
    """Returns passages with ``id`` and ``metadata["relevance_score"]`` in [0, 1], best first, ties by id.

    With ``FaissVectorStore`` the score is the cosine, negative values as 0 (see ``vectors.cosine_relevance``).

    Attributes:
        store: Where the passages are.
        k: How many passages ``invoke`` returns where the call names no ``k``.
        filter: Handed to the store with every question, where it is not None; for ``FaissVectorStore`` see
            ``filters.MetadataFilter``.
    """

    store: VectorStore
    filter: Any = None

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents for ``question``, best first.

        Args:
            question: Must hold a visible character.
            k: How many at most.

        Raises:
            ConfigError: the question is empty, or ``k`` is below 1.
            RetrievalError: the store cannot be searched.
        """
        question = checked_question(question, k)
        return _scored(self.store.similarity_search_with_relevance_scores(question, k, **self._options()))

    async def aretrieve(self, question: str, k: int) -> list[Document]:
        """Do what ``retrieve`` does without blocking the event loop.

        Args:
            question: Must hold a visible character.
            k: How many at most.
        """
        question = checked_question(question, k)
        return _scored(await self.store.asimilarity_search_with_relevance_scores(question, k, **self._options()))

    def _options(self) -> dict[str, Any]:
        return {} if self.filter is None else {"filter": self.filter}


def _scored(found: list[tuple[Document, float]]) -> list[Document]:
    documents = [
        Document(
            id=document_id(document),
            page_content=document.page_content,
            metadata={**document.metadata, "relevance_score": cosine_relevance(score)},
        )
        for document, score in found
    ]
    return sorted(documents, key=lambda document: (-document.metadata["relevance_score"], str(document.id)))
