"""What an index holds: files, passages, and the fields of the metadata."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.documents import IndexEntry
from rag_posfix.retrieval.index.storage import EXAMPLES, FieldSummary, summarize_index, unknown_fields
from tests.support.letter_embeddings import LetterEmbeddings

METADATA = [
    {"source": "a.md", "year": 1999, "tags": ["red", "blue"], "author": {"name": "Anna", "age": 40}},
    {"source": "a.md", "year": "unknown", "tags": [], "author": {"name": "Bert"}},
    {"source": "b.md", "year": 2001.5, "draft": True, "note": None, "places": [{"town": "Tull"}, {"town": "Venn"}]},
]


@pytest.fixture
def entries():
    files = (("a.md",), ("a.md", "copy/a.md"), ())
    return {
        f"d{number}": IndexEntry(Document(f"text {number}", id=f"d{number}", metadata=metadata), files[number])
        for number, metadata in enumerate(METADATA)
    }


@pytest.fixture
def folder(entries, tmp_path):
    store = FaissVectorStore(LetterEmbeddings())
    store.put_entries(entries, store.embed_texts([entry.document.page_content for entry in entries.values()]))
    store.save(tmp_path / "my.index")
    return tmp_path / "my.index"


def test_a_summary_has_the_passages_of_each_file_and_the_values_of_each_field(folder):
    summary = summarize_index(folder)
    assert summary.passages == 3
    assert summary.files == {"": 1, "a.md": 2, "copy/a.md": 1}
    assert {field.name: field for field in summary.fields} == {
        "author.age": FieldSummary("author.age", 1, {"number": 1}, 1, (40,)),
        "author.name": FieldSummary("author.name", 2, {"text": 2}, 2, ("Anna", "Bert")),
        "draft": FieldSummary("draft", 1, {"boolean": 1}, 1, (True,)),
        "note": FieldSummary("note", 0, {}, 0, ()),
        "places.town": FieldSummary("places.town", 1, {"text": 2}, 2, ("Tull", "Venn")),
        "source": FieldSummary("source", 3, {"text": 3}, 2, ("a.md", "b.md")),
        "tags": FieldSummary("tags", 1, {"text": 2}, 2, ("red", "blue")),
        "year": FieldSummary("year", 3, {"number": 2, "text": 1}, 3, (1999, "unknown", 2001.5)),
    }


def test_a_summary_has_some_values_of_a_field_and_the_number_of_all(tmp_path):
    texts = [f"text {number}" for number in range(EXAMPLES + 3)]
    metadatas = [{"number": number} for number in range(len(texts))]
    FaissVectorStore.from_texts(texts, LetterEmbeddings(), metadatas=metadatas).save(tmp_path / "my.index")
    (field,) = summarize_index(tmp_path / "my.index").fields
    assert (field.distinct, field.examples) == (EXAMPLES + 3, tuple(range(EXAMPLES)))


def test_a_folder_without_an_index_has_no_summary(tmp_path):
    with pytest.raises(RetrievalError, match="no index"):
        summarize_index(tmp_path)


@pytest.mark.parametrize(
    ("metadata_filter", "unknown"),
    [
        ({"year": 1999}, []),
        ({"author.name": "Anna", "places.town": "Tull"}, []),
        ({"colour": "red"}, ["colour"]),
        ({"$or": [{"Year": 1999}, {"$not": {"colour": "red"}}]}, ["Year", "colour"]),
        ({"author.town": "Tull"}, ["author.town"]),
    ],
)
def test_fields_of_a_filter_that_no_document_has_are_named(entries, metadata_filter, unknown):
    names, known = unknown_fields(entries.values(), metadata_filter)
    assert names == unknown
    assert known == ["author.age", "author.name", "draft", "note", "places.town", "source", "tags", "year"]
