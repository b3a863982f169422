"""Cohere chat with documents and citations, and rerank, version 2."""
