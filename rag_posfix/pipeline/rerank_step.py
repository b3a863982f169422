"""How a pipeline asks a reranker: which candidates are best, or for scores that documents lack. Knows roles only."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.documents import Document

from rag_posfix.contracts.cache_salt import salted
from rag_posfix.contracts.generator import Reranker

__all__ = ["best_of", "score_in_place"]

_PLACE = "_place"


def best_of(reranker: Reranker, question: str, documents: Sequence[Document], k: int, salt: str) -> list[Document]:
    """Return the ``k`` best of the candidates, best first; the first ``k`` where the reranker left them as they were.

    Args:
        reranker: Scores them.
        question: What they are scored for.
        documents: The candidates, best first as the retriever sees it.
        k: How many to return.
        salt: What is kept of them is shared with questions of the same salt only.
    """
    with salted(salt):
        return list(reranker.compress_documents(documents, question))[:k]


def score_in_place(reranker: Reranker, question: str, documents: Sequence[Document], salt: str) -> list[Document]:
    """Return scored copies in the order given: the order of the prompt is chosen later, by name.

    Args: those of ``best_of``.
    """
    marked = [
        Document(page_content=d.page_content, metadata={**d.metadata, _PLACE: place}, id=d.id)
        for place, d in enumerate(documents)
    ]
    with salted(salt):
        scored = sorted(reranker.compress_documents(marked, question), key=lambda d: int(d.metadata[_PLACE]))
    for document in scored:
        del document.metadata[_PLACE]
    return scored
