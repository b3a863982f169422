import pytest
from langchain_core.documents import Document

from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.index.documents import DocumentTable, IndexEntry, deep_copy, stored_copy, stored_id
from rag_posfix.text import content_hash


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


def test_a_deep_copy_shares_nothing_with_the_document():
    given = Document(id="a", page_content="x", metadata={"tags": ["t"]})
    copy = deep_copy(given)
    assert copy == given
    copy.metadata["tags"].append("new")
    assert given.metadata == {"tags": ["t"]}


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
