import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from rag_posfix.adapters.langchain.retriever import PosfixRetriever
from rag_posfix.retrieval.base import PassageRetriever
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.hybrid import HybridRetriever

TEXTS = [f"passage {number}" for number in range(6)]


def dense() -> PassageRetriever:
    return PassageRetriever(store=FaissVectorStore.from_texts(TEXTS, VectorStoreIntegrationTests.get_embeddings()))


def by_words() -> BM25Retriever:
    return BM25Retriever.from_documents(Document(text) for text in TEXTS)


class TestFaissVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        return FaissVectorStore(self.get_embeddings())


class TestGraphVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        return FaissVectorStore(self.get_embeddings(), kind="hnsw")


class TestPassageRetriever(RetrieversIntegrationTests):
    retriever_constructor = PassageRetriever
    retriever_query_example = "passage 3"

    @property
    def retriever_constructor_params(self) -> dict:
        return {"store": dense().store}


class TestBM25Retriever(RetrieversIntegrationTests):
    retriever_constructor = BM25Retriever
    retriever_query_example = "passage 3"

    @property
    def retriever_constructor_params(self) -> dict:
        return {"table": by_words().table}


class TestHybridRetriever(RetrieversIntegrationTests):
    retriever_constructor = HybridRetriever
    retriever_query_example = "passage 3"

    @property
    def retriever_constructor_params(self) -> dict:
        return {"retrievers": [dense(), by_words()]}


class TestPosfixRetriever(RetrieversIntegrationTests):
    retriever_constructor = PosfixRetriever
    retriever_query_example = "passage 3"

    @property
    def retriever_constructor_params(self) -> dict:
        return {"base_retriever": PassageRetriever(**TestPassageRetriever().retriever_constructor_params)}
