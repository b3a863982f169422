"""The protocols of what finds and scores documents: retriever and reranker. They name no concrete class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from langchain_core.documents import Document


@runtime_checkable
class Retriever(Protocol):
    """Finds candidates: Documents with ``id`` and ``metadata["relevance_score"]`` in [0, 1], best first."""

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents for ``question``, best first."""
        ...


@runtime_checkable
class Reranker(Protocol):
    """Scores documents for a question (a langchain ``BaseDocumentCompressor`` has this method)."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """Return copies, best first, with ``metadata["relevance_score"]`` in [0, 1]; ties keep their order."""
        ...
