"""A retriever over any langchain vector store. Knows nothing of how passages are stored or embedded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from rag_posfix.contracts.filters import parse_filter
from rag_posfix.contracts.retrieval import SimilarityRange, first_matching
from rag_posfix.retrieval.base import QuestionRetriever, scored_documents
from rag_posfix.retrieval.index.documents import both_filters

__all__ = ["PassageRetriever"]


class PassageRetriever(QuestionRetriever):
    """Returns passages with ``id`` and ``metadata["relevance_score"]`` in [0, 1], best first, ties by id.

    With ``FaissVectorStore`` the score is the cosine, or 0 for a negative cosine (see ``base.cosine_relevance``).

    Attributes:
        store: The passages.
        k: Number of passages that ``invoke`` returns if the call gives no ``k``.
        filter: Passed to the store with every search unless None, so in the form that the store takes; for
            ``FaissVectorStore`` see ``index.documents.MetadataFilter``. A store without an attribute
            ``evaluates_filters`` searches without the filter of a question, and its hits are checked one by one.
    """

    store: VectorStore
    filter: Any = None

    def similarity_range(self) -> SimilarityRange | None:
        """Return that of the store, if it has one, in place of none of its own."""
        return self.similarity or getattr(self.store, "similarity", None)

    def _search(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        store = self.store
        if metadata_filter is None or getattr(store, "evaluates_filters", False):
            options = _options(both_filters(self.filter, metadata_filter))
            return scored_documents(store.similarity_search_with_relevance_scores(question, k, **options))
        options = _options(self.filter)
        return first_matching(
            lambda width: scored_documents(store.similarity_search_with_relevance_scores(question, width, **options)),
            k,
            parse_filter(metadata_filter),
        )

    async def _asearch(self, question: str, k: int, metadata_filter: Mapping[str, Any] | None) -> list[Document]:
        if metadata_filter is not None:
            return await super()._asearch(question, k, metadata_filter)
        options = _options(self.filter)
        return scored_documents(await self.store.asimilarity_search_with_relevance_scores(question, k, **options))


def _options(metadata_filter: Any) -> dict[str, Any]:
    return {} if metadata_filter is None else {"filter": metadata_filter}
