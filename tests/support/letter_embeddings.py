"""Embeddings without a model."""

from langchain_core.embeddings import Embeddings


class LetterEmbeddings(Embeddings):
    """Counts of letters: readable, deterministic, and not of length one."""

    def __init__(self, identity: str = "letters:26") -> None:
        self.identity = identity
        self.texts: list[str] = []

    def embed_documents(self, texts):
        self.texts += texts
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text):
        return [float(text.lower().count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"]
