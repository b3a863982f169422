"""Reranking: one scorer per file, each a langchain ``BaseDocumentCompressor``."""
