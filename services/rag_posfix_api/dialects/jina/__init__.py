"""Jina rerank."""
