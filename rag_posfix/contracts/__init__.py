"""Contracts: the data that packages exchange, and the protocols of retriever, reranker and generator."""
