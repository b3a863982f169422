"""Adapters for langchain applications, on langchain-core alone."""

from rag_posfix.adapters.langchain.rag import PosfixRAG
from rag_posfix.adapters.langchain.retriever import PosfixRetriever

__all__ = ["PosfixRAG", "PosfixRetriever"]
