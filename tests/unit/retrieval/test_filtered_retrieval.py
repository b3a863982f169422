"""Filters in every retriever: pushed down, they find what checking each document finds, and nothing else."""

from datetime import date

import numpy as np
import pytest
from hypothesis import given, settings
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore

from rag_posfix.adapters.langchain.retriever import PosfixRetriever
from rag_posfix.contracts.retrieval import matches, parse_filter, retrieve_matching
from rag_posfix.errors import ConfigError, RetrievalError
from rag_posfix.retrieval.base import PassageRetriever, as_retriever, cosine_relevance
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.hybrid import HybridRetriever
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.random_filters import FILTERS, documents_with_metadata

DOCUMENTS = documents_with_metadata(30)
EVEN = {"number": {"$in": list(range(0, 30, 2))}}


class ScoredMemoryStore(InMemoryVectorStore):
    """langchain's store in memory; its scores are cosines already."""

    def _select_relevance_score_fn(self):
        return cosine_relevance


@pytest.fixture(scope="module")
def faiss_store():
    store = FaissVectorStore(LetterEmbeddings())
    store.add_documents(DOCUMENTS)
    return store


@pytest.fixture(scope="module")
def retrievers(faiss_store):
    """By name: pushed down in FAISS and BM25, both at once, and checked document by document."""
    dense, words = PassageRetriever(store=faiss_store), BM25Retriever.from_documents(DOCUMENTS)
    memory = ScoredMemoryStore(LetterEmbeddings())
    memory.add_documents(DOCUMENTS)
    return {
        "faiss": dense,
        "bm25": words,
        "hybrid": HybridRetriever(retrievers=[dense, words]),
        "other_store": PassageRetriever(store=memory),
        "langchain": as_retriever(faiss_store.as_retriever(search_kwargs={"k": 6})),
        "langchain_other": as_retriever(memory.as_retriever(search_kwargs={"k": 6})),
    }


@pytest.mark.parametrize(("name", "count"), [("faiss", 150), ("bm25", 150), ("hybrid", 30), ("other_store", 30)])
def test_random_filters_find_exactly_the_documents_that_match(retrievers, name, count):
    n_matching = []

    @settings(max_examples=count, derandomize=True)
    @given(FILTERS)
    def check(metadata_filter):
        condition = parse_filter(metadata_filter)
        expected = sorted(str(document.id) for document in DOCUMENTS if matches(condition, document.metadata))
        hits = retrievers[name].retrieve("common", 40, filter=metadata_filter)
        assert sorted(str(document.id) for document in hits) == expected
        n_matching.append(len(expected))

    check()
    assert sum(0 < n < len(DOCUMENTS) for n in n_matching) > len(n_matching) / 2  # the filters are no trivial ones


@pytest.mark.parametrize("name", ["faiss", "bm25", "hybrid", "other_store", "langchain", "langchain_other"])
def test_filtered_search_fills_k_with_the_best_matching_documents(retrievers, name):
    everything = retrieve_matching(retrievers[name], "common words 7", 40, None)
    hits = retrieve_matching(retrievers[name], "common words 7", 6, EVEN)
    assert len(hits) == 6
    assert all(document.metadata["number"] % 2 == 0 for document in hits)
    if name in ("faiss", "bm25", "hybrid"):  # ties of the others have no order
        expected = [document.id for document in everything if document.metadata["number"] % 2 == 0]
        assert [document.id for document in hits] == expected[:6]


async def test_asynchronous_searches_filter_too(retrievers):
    for name in ("faiss", "bm25", "hybrid", "other_store"):
        hits = await retrievers[name].aretrieve("common", 40, filter=EVEN)
        assert {document.metadata["number"] for document in hits} == set(range(0, 30, 2)), name
        hits = await retrievers[name].ainvoke("common", k=40, filter=EVEN)
        assert len(hits) == 15, name


def test_filter_of_a_search_is_joined_with_that_of_the_retriever(faiss_store):
    low = {"number": {"$lt": 10}}
    for retriever in (
        PassageRetriever(store=faiss_store, filter=low),
        PassageRetriever(store=faiss_store, filter=lambda metadata: metadata["number"] < 10),
        BM25Retriever.from_documents(DOCUMENTS, filter=low),
        as_retriever(faiss_store.as_retriever(search_kwargs={"k": 40, "filter": low})),
        PosfixRetriever(base_retriever=faiss_store.as_retriever(search_kwargs={"k": 40}), filter=low),
    ):
        hits = retrieve_matching(retriever, "common", 40, EVEN)
        assert sorted(document.metadata["number"] for document in hits) == [0, 2, 4, 6, 8]


class ForgetfulRetriever(BaseRetriever):
    """Says that it filters, and does not."""

    evaluates_filters: bool = True

    def _get_relevant_documents(self, query, *, run_manager, filter=None):
        return [document.model_copy() for document in DOCUMENTS]


class OpenRetriever:
    def retrieve(self, question, k, filter=None):
        return DOCUMENTS[:k]


@pytest.mark.parametrize("retriever", [as_retriever(ForgetfulRetriever()), OpenRetriever()])
def test_documents_that_a_retriever_should_have_left_out_are_left_out(retriever):
    assert {document.metadata["number"] % 2 for document in retrieve_matching(retriever, "x", 40, EVEN)} == {0}


def test_function_is_retried_with_more_documents_until_enough_match():
    widths = []

    class Plain:
        def retrieve(self, question, k):
            widths.append(k)
            return [Document(id=str(n), page_content="x", metadata={"n": n}) for n in range(min(k, 1000))]

    hits = retrieve_matching(Plain(), "x", 2, {"n": {"$gte": 30}})
    assert [document.metadata["n"] for document in hits] == [30, 31]
    assert widths == [2, 8, 32]
    assert retrieve_matching(Plain(), "x", 2, {"n": -1}) == []
    assert widths[3:] == [2, 8, 32, 128, 512, 2048]  # where there are no more


def test_malformed_filter_is_rejected_by_every_retriever(retrievers):
    for name in ("faiss", "bm25", "hybrid"):
        with pytest.raises(ConfigError, match="not understood"):
            retrievers[name].retrieve("common", 3, filter={"$nor": []})


TYPED = [
    Document("pump one", id="a", metadata={"year": np.int64(1999), "secret": np.True_, "tag": np.str_("x")}),
    Document("pump two", id="b", metadata={"year": 1999, "secret": True, "tag": "x", "parts": (np.float32(0.5), 2)}),
    Document("pump three", id="c", metadata={"author": {"name": "Anna", "year": np.int32(1990)}}),
    Document("pump four", id="d", metadata={"author": [{"name": "Bo"}, {"name": "Anna"}], "secret": False}),
    Document("pump five", id="e", metadata={"author.name": "Anna", "author": {"name": "Cy"}}),
]


@pytest.mark.parametrize(
    ("metadata_filter", "expected"),
    [
        ({"year": 1999}, "ab"),
        ({"secret": {"$ne": True}}, "cde"),
        ({"year": {"$in": [np.int64(1999)]}}, "ab"),
        ({"parts": 0.5}, "b"),
        ({"parts": {"$gt": 1}}, "b"),
        ({"author.name": "Anna"}, "cde"),  # of e, the field that has this name
        ({"author.name": "Cy"}, ""),
        ({"author.name": {"$exists": True}}, "cde"),
        ({"author.year": {"$lt": 2000}}, "c"),
        ({"author.name": {"$ne": "Anna"}}, "ab"),
        ({"author.name.first": "Anna"}, ""),
        ({"publisher.name": "Anna"}, ""),
    ],
)
def test_numbers_of_numpy_and_nested_fields_are_found(metadata_filter, expected):
    words = BM25Retriever.from_documents(TYPED)
    assert "".join(sorted(str(hit.id) for hit in words.retrieve("pump", 9, filter=metadata_filter))) == expected
    # Checked document by document, as in a store of another program, the same is found.
    taken = [words.table.entry_of(name).document for name in "abcde"]
    condition = parse_filter(metadata_filter)
    assert "".join(document.id for document in taken if matches(condition, document.metadata)) == expected


@pytest.mark.parametrize("value", [date(2024, 5, 1), {1, 2}, np.zeros(2), float("nan"), np.float32("inf"), object()])
def test_metadata_of_other_types_is_refused_when_a_document_is_taken(value):
    document = Document("x", id="a", metadata={"nested": [{"field": value}]})
    with pytest.raises(RetrievalError, match=r"document 'a' has metadata that JSON cannot hold \(a \w+: "):
        BM25Retriever.from_documents([document])
    with pytest.raises(RetrievalError, match="document 'a' has metadata"):
        FaissVectorStore(LetterEmbeddings()).add_documents([document])
