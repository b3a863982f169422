import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore

from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.base import PassageRetriever, as_retriever
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.hybrid import HybridRetriever

DOCUMENTS = [Document(page_content=text, id=text) for text in ("one", "two", "three")]


class Plain(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return DOCUMENTS


class Counted(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager, k=1):
        return DOCUMENTS[::-1][:k]


@pytest.mark.parametrize("given", [Plain(), RunnableLambda(lambda _: DOCUMENTS), lambda _: tuple(DOCUMENTS)])
def test_a_retriever_that_knows_no_number_gives_its_first_documents(given):
    assert [one.id for one in as_retriever(given).retrieve("which?", 2)] == ["one", "two"]


def test_a_retriever_that_takes_k_gets_it():
    assert [one.id for one in as_retriever(Counted()).retrieve("which?", 2)] == ["three", "two"]


@pytest.mark.parametrize("given", ["my.index", 5, BM25Retriever])
def test_what_is_no_retriever_is_refused(given):
    with pytest.raises(ConfigError, match=r"must be a langchain retriever \(store.as_retriever\(\)\)"):
        as_retriever(given)


@pytest.mark.parametrize(("found", "shown"), [("text", "returned str"), (["text"], "returned a list with str in it")])
def test_what_is_no_document_is_refused(found, shown):
    with pytest.raises(RetrievalError, match=shown):
        as_retriever(lambda _: found).retrieve("which?", 2)


@pytest.fixture(params=["bm25", "dense", "hybrid"])
def retriever(request, store):
    """A retriever whose ``invoke`` returns one passage."""
    words, vectors = BM25Retriever.from_documents(store.documents(), k=1), PassageRetriever(store=store, k=1)
    hybrid = HybridRetriever(retrievers=[HybridRetriever(retrievers=[words, vectors]), vectors], k=1)
    return {"bm25": words, "dense": vectors, "hybrid": hybrid}[request.param]


async def test_it_is_a_retriever_for_the_pipeline_and_for_langchain(retriever):
    assert isinstance(retriever, Retriever)
    assert as_retriever(retriever) is retriever
    question = "aaa aab bbb"
    assert len(retriever.invoke(question)) == 1
    results = [retriever.retrieve(question, 2), retriever.invoke(question, k=2)]
    results += [await retriever.aretrieve(question, 2), await retriever.ainvoke(question, k=2)]
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 2


@pytest.mark.parametrize(("question", "k"), [("", 1), (" \n", 1), ("aaa", 0), ("aaa", -3), ("aaa", 1.5)])
async def test_an_empty_question_and_a_k_below_one_are_refused(retriever, question, k):
    message = r"question is empty|must be an integer >= 1"
    for search in (retriever.retrieve, lambda question, k: retriever.invoke(question, k=k)):
        with pytest.raises(ConfigError, match=message):
            search(question, k)
    for search in (retriever.aretrieve, lambda question, k: retriever.ainvoke(question, k=k)):
        with pytest.raises(ConfigError, match=message):
            await search(question, k)


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
