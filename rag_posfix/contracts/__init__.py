"""Contracts: the data that packages exchange, and the interfaces of retriever, reranker and generator."""
