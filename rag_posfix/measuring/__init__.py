"""Measuring: whether a model has a position bias on one's own documents, and which arrangement to use."""
