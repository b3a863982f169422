"""Contracts: what packages pass to each other, and the protocols of retriever, reranker and generator."""
