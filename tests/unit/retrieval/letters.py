"""The old place of ``LetterEmbeddings``."""

from tests.support.letter_embeddings import LetterEmbeddings

__all__ = ["LetterEmbeddings"]
