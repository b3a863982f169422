"""Retrieval: a question in, the best passages out, by embeddings, by words, or both."""
