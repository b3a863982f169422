import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore

from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.base import PassageRetriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore


def test_passages_carry_id_and_relevance_best_first(store):
    retriever = PassageRetriever(store=store)
    assert isinstance(retriever, Retriever)
    found = retriever.retrieve("aaa", k=2)
    assert [document.id for document in found] == ["one", "two"]
    assert [document.metadata["relevance_score"] for document in found] == pytest.approx([1.0, 0.894427])
    assert "relevance_score" not in store.get_by_ids(["one"])[0].metadata


async def test_a_filter_goes_to_the_store_with_every_question(embeddings):
    metadatas = [{"year": 1}, {"year": 2}, {"year": 2}]
    store = FaissVectorStore.from_texts(["aaa", "aab", "bbb"], embeddings, metadatas, ids=["one", "two", "three"])
    retriever = PassageRetriever(store=store, filter={"year": 2})
    assert [document.id for document in retriever.retrieve("aaa", 3)] == ["two", "three"]
    assert await retriever.ainvoke("aaa", k=1) == retriever.retrieve("aaa", 1)
    with pytest.raises(ConfigError, match="filter="):
        PassageRetriever(store=store, filter="year=2").retrieve("aaa", 3)


def test_stores_of_others_are_served_with_scores_kept_in_range_and_ids_filled(embeddings):
    class Careless(InMemoryVectorStore):
        def similarity_search_with_relevance_scores(self, query, k=4, **kwargs):
            return [(Document("x"), -0.5), (Document("y", metadata={"n": 1}), 1.5)]

    first, second = PassageRetriever(store=Careless(embeddings)).retrieve("q", 2)
    assert (first.page_content, first.metadata) == ("y", {"n": 1, "relevance_score": 1.0})
    assert (second.page_content, second.metadata) == ("x", {"relevance_score": 0.0})
    assert first.id != second.id
