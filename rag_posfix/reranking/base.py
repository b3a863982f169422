"""The rerankers by name, and what they share. Knows no model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.errors import RerankingError
from rag_posfix.registry import Registry

__all__ = ["DETAILS", "RERANKERS", "ranked_copies"]

RERANKERS: Registry[type[BaseDocumentCompressor]] = Registry("reranker", parts=("embeddings", "generator"))

DETAILS = "reranking"
"""Key in a document's metadata under which a reranker says how it came to its score."""


def ranked_copies(
    documents: Sequence[Document],
    scores: Sequence[float],
    top_n: int | None = None,
    details: Sequence[Mapping[str, Any]] | None = None,
) -> list[Document]:
    """Return copies with ``metadata["relevance_score"]``, best first; equal scores keep the given order.

    Args:
        documents: What was scored; left untouched.
        scores: One per document, in [0, 1].
        top_n: How many to return, all if None.
        details: What ``metadata["reranking"]`` is to say of each; None leaves that key alone.

    Raises:
        RerankingError: scores are missing, or one is not a number in [0, 1].
    """
    if len(scores) != len(documents):
        raise RerankingError(f"{len(scores)} scores for {len(documents)} documents; need one score per document")
    for document, score in zip(documents, scores, strict=True):
        if not (math.isfinite(score) and 0.0 <= score <= 1.0):
            raise RerankingError(f"document {document.id!r} was scored {score}; a score must lie in [0, 1]")
    order = sorted(range(len(documents)), key=lambda index: -scores[index])
    return [
        _scored(documents[index], scores[index], None if details is None else details[index])
        for index in order[:top_n]
    ]


def _scored(document: Document, score: float, details: Mapping[str, Any] | None) -> Document:
    metadata = {**(document.metadata or {}), "relevance_score": score}
    if details is not None:
        metadata[DETAILS] = dict(details)
    return document.model_copy(update={"metadata": metadata})
