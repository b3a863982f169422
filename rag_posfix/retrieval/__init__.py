"""Retrieval: files to documents, documents to an index, a question to the best passages."""
