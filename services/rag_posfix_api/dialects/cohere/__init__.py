"""Cohere rerank, version 2."""
