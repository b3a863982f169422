"""Ranking experiments: rerankers on test collections, with measures and significance tests."""
