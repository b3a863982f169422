import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda

from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.base import as_retriever
from rag_posfix.retrieval.bm25 import BM25Retriever

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


def test_the_pipelines_own_retrievers_stay_as_they_are():
    words = BM25Retriever.from_documents(DOCUMENTS)
    assert as_retriever(words) is words


@pytest.mark.parametrize("given", ["my.index", 5, BM25Retriever])
def test_what_is_no_retriever_is_refused(given):
    with pytest.raises(ConfigError, match=r"must be a langchain retriever \(store.as_retriever\(\)\)"):
        as_retriever(given)


@pytest.mark.parametrize(("found", "shown"), [("text", "returned str"), (["text"], "returned a list with str in it")])
def test_what_is_no_document_is_refused(found, shown):
    with pytest.raises(RetrievalError, match=shown):
        as_retriever(lambda _: found).retrieve("which?", 2)
