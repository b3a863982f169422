"""A retriever over any langchain vector store. Knows nothing of how passages are stored or embedded."""

from __future__ import annotations

from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from rag_posfix.retrieval.base import QuestionRetriever, cosine_relevance
from rag_posfix.retrieval.index.documents import stored_id

__all__ = ["PassageRetriever"]


class PassageRetriever(QuestionRetriever):
    """Returns passages with ``id`` and ``metadata["relevance_score"]`` in [0, 1], best first, ties by id.

    With ``FaissVectorStore`` the score is the cosine, or 0 for a negative cosine (see ``base.cosine_relevance``).

    Attributes:
        store: The passages.
        k: Number of passages that ``invoke`` returns if the call gives no ``k``.
        filter: Passed to the store with every search unless None; for ``FaissVectorStore`` see
            ``index.documents.MetadataFilter``.
    """

    store: VectorStore
    filter: Any = None

    def _search(self, question: str, k: int) -> list[Document]:
        return _scored(self.store.similarity_search_with_relevance_scores(question, k, **self._options()))

    async def _asearch(self, question: str, k: int) -> list[Document]:
        return _scored(await self.store.asimilarity_search_with_relevance_scores(question, k, **self._options()))

    def _options(self) -> dict[str, Any]:
        return {} if self.filter is None else {"filter": self.filter}


def _scored(hits: list[tuple[Document, float]]) -> list[Document]:
    documents = [
        Document(
            id=stored_id(document),
            page_content=document.page_content,
            metadata={**document.metadata, "relevance_score": cosine_relevance(score)},
        )
        for document, score in hits
    ]
    return sorted(documents, key=lambda document: (-document.metadata["relevance_score"], str(document.id)))
