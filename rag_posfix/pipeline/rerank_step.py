"""How a pipeline uses a reranker: to select the best candidates, or to score documents. Knows protocols only."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.documents import Document

from rag_posfix.contracts.cache_salt import salted
from rag_posfix.contracts.retrieval import Reranker, rerank_indexed


def best_of(reranker: Reranker, question: str, documents: Sequence[Document], k: int, salt: str) -> list[Document]:
    """Return the ``k`` best candidates, best first; the first ``k`` if the reranker kept the given order.

    Args:
        documents: The candidates, best first according to the retriever.
        k: Number of candidates to return.
        salt: Cached keys and values of documents are shared only with questions of the same salt.
    """
    with salted(salt):
        return list(reranker.compress_documents(documents, question))[:k]


def score_in_place(reranker: Reranker, question: str, documents: Sequence[Document], salt: str) -> list[Document]:
    """Return scored copies in the given order: the order of the prompt is chosen later.

    Args:
        salt: As for ``best_of``.

    Raises:
        RerankingError: the reranker dropped the metadata of a document.
    """
    with salted(salt):
        ranked = rerank_indexed(reranker, question, documents)
    return [one.document for one in sorted(ranked, key=lambda one: one.index)]
