"""Adapters for langchain applications, on langchain-core alone."""

from rag_posfix.integrations.langchain.rag import PosfixRAG
from rag_posfix.integrations.langchain.retriever import PosfixRetriever

__all__ = ["PosfixRAG", "PosfixRetriever"]
