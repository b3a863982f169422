import pytest

from rag_posfix.retrieval.faiss_store import FaissVectorStore
from tests.support.letter_embeddings import LetterEmbeddings


@pytest.fixture
def embeddings():
    return LetterEmbeddings()


@pytest.fixture
def store(embeddings):
    return FaissVectorStore.from_texts(["aaa", "aab", "bbb"], embeddings, ids=["one", "two", "three"])
