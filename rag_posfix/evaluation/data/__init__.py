"""Evaluation data: reading and checking questions, collections and TREC files."""
