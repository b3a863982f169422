import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from rag_posfix.integrations.langchain.retriever import PosfixRetriever
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.dense import PassageRetriever
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
    @property
    def retriever_constructor(self) -> type[PassageRetriever]:
        return PassageRetriever

    @property
    def retriever_constructor_params(self) -> dict:
        return {"store": dense().store}

    @property
    def retriever_query_example(self) -> str:
        return "passage 3"


class TestBM25Retriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BM25Retriever]:
        return BM25Retriever

    @property
    def retriever_constructor_params(self) -> dict:
        return {"table": by_words().table}

    @property
    def retriever_query_example(self) -> str:
        return "passage 3"


class TestHybridRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[HybridRetriever]:
        return HybridRetriever

    @property
    def retriever_constructor_params(self) -> dict:
        return {"retrievers": [dense(), by_words()]}

    @property
    def retriever_query_example(self) -> str:
        return "passage 3"


class TestPosfixRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[PosfixRetriever]:
        return PosfixRetriever

    @property
    def retriever_constructor_params(self) -> dict:
        return {"base_retriever": PassageRetriever(**TestPassageRetriever().retriever_constructor_params)}

    @property
    def retriever_query_example(self) -> str:
        return "passage 3"
