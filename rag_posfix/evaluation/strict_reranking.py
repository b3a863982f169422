"""Reranking in experiments: a reranker that fails is an error, and never leaves the documents in their order."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.documents import Document

from rag_posfix.contracts.answer import collected_warnings
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import RerankingError


def rerank_or_raise(
    reranker: Reranker, documents: Sequence[Document], question: str, *, label: str, query: str
) -> Sequence[Document]:
    """Return what a reranker returns; ``label`` and ``query``, the question's id, are for messages.

    Raises:
        RerankingError: it failed or was late.
    """
    with collected_warnings() as warnings:
        try:
            returned = reranker.compress_documents(documents, question)
        except Exception as error:
            raise RerankingError(
                f"{label} failed on query {query!r} ({type(error).__name__}: {error}); what was ranked before is kept"
            ) from error
    if warnings:
        raise RerankingError(f"{label} failed on query {query!r}: {warnings[0]}; what was ranked before is kept")
    return returned
