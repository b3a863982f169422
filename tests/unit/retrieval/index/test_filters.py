import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.documents import DocumentTable, IndexEntry
from tests.support.letter_embeddings import LetterEmbeddings


def table_of(*metadata):
    table = DocumentTable()
    table.add(IndexEntry(Document(id=str(n), page_content="x", metadata=each)) for n, each in enumerate(metadata))
    return table


def test_a_filter_follows_changes_of_the_documents():
    table = table_of({"a": 1}, {"a": 2})
    assert table.matching({"a": 1}).tolist() == [0]
    table.add([IndexEntry(Document(id="new", page_content="", metadata={"a": 1}))])
    table.remove(["0"])
    table.replace([IndexEntry(Document(id="1", page_content="", metadata={"a": 1}))])
    assert table.matching({"a": 1}).tolist() == [1, 2]


class Passes(dict):
    """Entries that count the passes over them."""

    made = 0

    def items(self):
        self.made += 1
        return super().items()


def test_fields_that_no_document_has_cost_one_pass_together():
    entries = Passes({0: IndexEntry(Document(id="0", page_content="x", metadata={"a": 1}))})
    table = DocumentTable(entries)
    for number in range(5):
        assert table.matching({f"unknown {number}": 1}).tolist() == []
        assert table.matching({f"unknown {number}": {"$exists": False}}).tolist() == [0]
    assert entries.made == 1
    assert table.matching({"a": 1}).tolist() == [0]
    table.add([IndexEntry(Document(id="1", page_content="x", metadata={"unknown 3": 1}))])
    assert table.matching({"unknown 3": 1}).tolist() == [1]


def test_names_of_fields_that_no_document_has_are_not_kept():
    class Name(str):
        """A text that can be referred to weakly."""

    table, name = table_of({"a": 1}), Name("unknown")
    reference = weakref.ref(name)
    table.matching({name: 1})
    del name
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_a_filter_returns_no_forbidden_document_after_the_first_documents_were_removed(kind):
    store = FaissVectorStore(LetterEmbeddings(), kind=kind)
    tenants = ["acme", "bolt"] * 6
    store.add_documents(
        [Document(id=f"{n:02}", page_content="abc", metadata={"tenant": tenant}) for n, tenant in enumerate(tenants)]
    )
    store.delete(["00", "01", "02", "03"])
    found = store.similarity_search("abc", 12, filter={"tenant": "bolt"})
    assert sorted(document.id for document in found) == ["05", "07", "09", "11"]


def test_a_function_cannot_change_the_metadata():
    def careless(metadata):
        metadata["a"] = 2

    with pytest.raises(TypeError, match="does not support item assignment"):
        table_of({"a": 1}).matching(careless)


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [(5, "filter=5 is a int"), ({"a": {"$like": 1}}, "'\\$like' is not understood"), ({1: 2}, "not understood")],
)
def test_what_is_no_filter_is_refused(chosen, problem):
    store = FaissVectorStore.from_texts(["abc"], LetterEmbeddings())
    with pytest.raises(ConfigError, match=problem):
        store.similarity_search("a", filter=chosen)


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
@settings(max_examples=30, deadline=None)
@given(years=st.lists(st.integers(0, 4), min_size=1, max_size=60), wanted=st.integers(0, 4), k=st.integers(1, 12))
def test_a_filtered_search_is_a_search_of_what_the_filter_lets_through(kind, years, wanted, k):
    texts = ["abcdefgh"[: 1 + n % 8] * (1 + n % 3) for n in range(len(years))]
    documents = [
        Document(id=f"{n:02}", page_content=text, metadata={"year": year})
        for n, (text, year) in enumerate(zip(texts, years, strict=True))
    ]
    store, alone = FaissVectorStore(LetterEmbeddings(), kind=kind), FaissVectorStore(LetterEmbeddings())
    store.add_documents(documents)
    alone.add_documents([document for document in documents if document.metadata["year"] == wanted])
    found = store.similarity_search_with_score("abc", k, filter={"year": wanted})
    assert found == alone.similarity_search_with_score("abc", k)
    assert len(found) == min(k, years.count(wanted))
    assert found == store.similarity_search_with_score("abc", k, filter=lambda metadata: metadata["year"] == wanted)
