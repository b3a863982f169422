import pytest
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from rag_posfix.integrations.langchain.retriever import PosfixRetriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.retriever import PassageRetriever


class TestFaissVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        return FaissVectorStore(self.get_embeddings())


class TestPassageRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[PassageRetriever]:
        return PassageRetriever

    @property
    def retriever_constructor_params(self) -> dict:
        texts = [f"passage {number}" for number in range(6)]
        return {"store": FaissVectorStore.from_texts(texts, VectorStoreIntegrationTests.get_embeddings())}

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
