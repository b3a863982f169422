"""Reranking: one scorer per file, each a langchain ``BaseDocumentCompressor``.

Importing ``RERANKERS`` from here finds every built-in reranker registered; none of them loads a model on import.
"""

from rag_posfix.reranking.base import RERANKERS
from rag_posfix.reranking.embedding import EmbeddingReranker

__all__ = ["RERANKERS", "EmbeddingReranker"]
