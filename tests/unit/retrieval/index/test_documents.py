import gc
import sqlite3
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, IndexBusyError, RetrievalError
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.documents import (
    DocumentFile,
    DocumentTable,
    IndexEntry,
    stored_copy,
    stored_id,
)
from rag_posfix.text import content_hash
from tests.support.letter_embeddings import LetterEmbeddings


def entry(name, text="x"):
    return IndexEntry(Document(id=name, page_content=text))


def test_a_document_is_stored_under_its_id_or_a_hash_of_text_and_metadata():
    assert stored_id(Document(id="a\x00", page_content="x")) == "a\ufffd"
    assert stored_id(Document(page_content="x", metadata={"id": "y"})) == content_hash("x", "id", "'y'")
    assert stored_id(Document(page_content="x")) != stored_id(Document(page_content="x", metadata={"page": 2}))


def test_a_stored_copy_is_clean_and_shares_nothing_with_the_document():
    given = Document(id="a", page_content="x\x00", metadata={"tags": ["\ud800"]})
    copy = stored_copy(given)
    assert copy == Document(id="a", page_content="x\ufffd", metadata={"tags": ["\ufffd"]})
    copy.metadata["tags"].append("new")
    assert given.metadata == {"tags": ["\ud800"]}
    assert stored_copy(given, "b").id == "b"
    assert stored_copy(Document("x")).id == stored_id(Document("x"))


def test_keys_ascend_and_are_never_used_again():
    table = DocumentTable()
    assert table.add([entry("a"), entry("b")]) == [0, 1]
    keys, removed = table.remove(["b"])
    assert (keys, [document.id for document in removed]) == ([1], ["b"])
    assert table.add([entry("b")]) == [2]
    assert (table.ids(), table.key_of("b"), table.key_of("c"), table.document(1)) == (["a", "b"], 2, None, None)
    assert DocumentTable({7: entry("a")}).next_key == 8


def test_every_change_has_a_revision_of_its_own():
    table = DocumentTable()
    revisions = [table.revision]
    for change in (
        lambda: table.add([entry("a")]),
        lambda: table.replace([entry("a", "y")]),
        lambda: table.remove(["a"]),
    ):
        change()
        revisions.append(table.revision)
    assert len(set(revisions)) == 4


def test_a_snapshot_is_of_one_revision():
    table = DocumentTable()
    table.add([entry("a", "one"), entry("b", "two")])
    table.replace([entry("a", "three")])
    assert table.snapshot() == (table.revision, [0, 1], ["three", "two"])


def test_a_table_over_an_immutable_mapping_refuses_changes():
    from types import MappingProxyType

    table = DocumentTable(MappingProxyType({0: entry("a")}))
    for change in (lambda: table.add([entry("b")]), lambda: table.replace([entry("a")]), lambda: table.remove(["a"])):
        with pytest.raises(ConfigError, match="mmap=True and cannot be changed"):
            change()
    assert (table.ids(), table.revision) == (["a"], 0)


ENTRY = IndexEntry(Document(id="a", page_content="text ü", metadata={"year": 1999, "tags": ["x"]}), ("a.txt",))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "documents.sqlite"
    DocumentFile.create(path, {"count": 1}, [(7, ENTRY, b"\0\0\x80\x3f")])
    assert {file.name for file in tmp_path.iterdir()} == {"documents.sqlite", "documents.sqlite-journal"}
    return path


def change(path, statement):
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


def test_rows_and_facts_are_read_as_they_were_written(path):
    file = DocumentFile(path)
    assert (file.facts(), list(file.rows()), list(file.rows(after=7))) == (
        {"count": 1}, [(7, ENTRY, b"\0\0\x80\x3f")], [],
    )  # fmt: skip


def test_metadata_can_be_queried(path):
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT id FROM documents WHERE json_extract(metadata, '$.year') > 1990").fetchall()
    assert rows == [("a",)]


@pytest.mark.parametrize(
    "assignment",
    ["key = 8", "id = 'b'", "text = 'text'", "metadata = '{}'", "files = '[]'", "vector = NULL", "vector = 'x'"],
)
def test_a_row_that_was_changed_is_an_error(path, assignment):
    change(path, f"UPDATE documents SET {assignment}")
    with pytest.raises(RetrievalError, match=r"is damaged: the row of document '.' has another checksum"):
        list(DocumentFile(path).rows())


@pytest.mark.parametrize("statement", ["UPDATE facts SET value = '{}'", "DELETE FROM facts", "DROP TABLE facts"])
def test_facts_that_were_changed_are_an_error(path, statement):
    change(path, statement)
    with pytest.raises(RetrievalError, match=r"is damaged: (its facts|no such table)"):
        DocumentFile(path).facts()


def test_one_writes_at_a_time_and_a_block_that_raises_changes_nothing(path):
    writer, other = DocumentFile(path), DocumentFile(path, wait_seconds=0)

    def fail():
        with writer.transaction():
            writer.remove(["a"])
            with pytest.raises(IndexBusyError, match="is being written by another process"), other.transaction():
                pass
            assert len(list(other.rows())) == 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with other.transaction():
        assert len(list(other.rows())) == 1


def test_a_file_that_is_missing_is_named_as_such(tmp_path):
    with pytest.raises(FileNotFoundError):
        DocumentFile(tmp_path / "none.sqlite")


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
