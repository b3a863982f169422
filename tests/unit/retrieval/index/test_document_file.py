import sqlite3

import pytest
from langchain_core.documents import Document

from rag_posfix.errors import IndexBusyError, RetrievalError
from rag_posfix.retrieval.index.documents import DocumentFile, IndexEntry

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
