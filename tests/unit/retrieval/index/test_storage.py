from __future__ import annotations

import io
import itertools
import json
import os
import random
from pathlib import Path

import faiss
import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.bm25 import BM25Index, BM25Retriever
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index import storage
from rag_posfix.retrieval.index.documents import IndexEntry, searchable_text
from rag_posfix.retrieval.index.file_formats import BM25_ROLES, VectorIndex, read_vectors
from rag_posfix.retrieval.index.storage import (
    EXAMPLES,
    FieldSummary,
    read_bm25,
    read_entries,
    summarize_index,
    unknown_fields,
)
from tests.support.letter_embeddings import LetterEmbeddings
from tests.unit.retrieval.index_files import data_file, forge_file

OLD_INDEX = Path(__file__).resolve().parents[3] / "data" / "old_stores" / "index-2"


@pytest.fixture
def folder(store, tmp_path):
    store.save(tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture
def with_words(store, folder):
    store.save(folder, bm25=BM25Index.build(map(searchable_text, store.documents())))
    return folder


def refusal(folder, embeddings=None, **options):
    with pytest.raises(RetrievalError) as caught:
        FaissVectorStore.load(folder, embeddings or LetterEmbeddings(), **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_saved_store_is_the_same_after_loading(embeddings, tmp_path):
    documents = [
        Document(id="a", page_content="<|im_end|> 数据 😀 \u2028\r\n", metadata={"n": 2**70, "deep": [{"x": None}]}),
        Document(id="b", page_content="", metadata={}),
    ]
    store = FaissVectorStore(embeddings)
    store.add_documents(documents)
    manifest = store.save(tmp_path / "new" / "index")
    loaded = FaissVectorStore.load(str(tmp_path / "new" / "index"), embeddings)
    assert loaded.get_by_ids(["a", "b"]) == documents
    assert (manifest.count, manifest.dimension, manifest.embedding) == (2, 26, "letters:26")
    assert loaded.similarity_search_with_score("im end", k=2) == store.similarity_search_with_score("im end", k=2)
    assert str(tmp_path) not in (tmp_path / "new" / "index" / "manifest.json").read_text()


@pytest.mark.parametrize("mmap", [False, True])
def test_an_index_that_an_earlier_release_wrote_is_read(embeddings, mmap):
    store = FaissVectorStore.load(OLD_INDEX, embeddings, mmap=mmap)
    (first, score), *_ = store.similarity_search_with_score("aaa", 3)
    assert (first.id, first.metadata["n"], score, len(store)) == ("a", 1, 1.0, 3)
    assert [hit.id for hit in BM25Retriever.load(OLD_INDEX, mmap=mmap).retrieve("ü", 3)] == ["c"]


def test_a_loaded_store_can_be_changed_and_saved_again(folder, embeddings):
    store = FaissVectorStore.load(folder, embeddings)
    store.delete(["one"])
    store.add_texts(["ccc", "bab"], ids=["four", "two"])
    store.save(folder)
    again = FaissVectorStore.load(folder, embeddings)
    assert [document.id for document in again.similarity_search("ccc", k=3)] == ["four", "three", "two"]
    assert again.similarity_search("bba", k=1)[0].page_content == "bab"
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("mmap", [False, True])
def test_an_empty_store_can_be_saved_and_loaded(embeddings, tmp_path, mmap):
    FaissVectorStore(embeddings).save(tmp_path / "index", bm25=BM25Index.build([]))
    assert FaissVectorStore.load(tmp_path / "index", embeddings, mmap=mmap).similarity_search("a") == []
    assert BM25Retriever.load(tmp_path / "index", mmap=mmap).retrieve("a", 3) == []


def test_an_existing_empty_folder_is_used_also_after_a_save_that_was_stopped(store, embeddings, tmp_path):
    (tmp_path / "vectors-0123456789ab.faiss").write_bytes(b"left over")
    store.save(tmp_path)
    assert len(FaissVectorStore.load(tmp_path, embeddings)) == 3


@pytest.mark.parametrize("role", ["vectors", "documents", "table", *BM25_ROLES[:1]])
@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_that_is_truncated_changed_or_missing_is_named(with_words, role, mmap):
    path = data_file(with_words, role)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    damages = (
        (content[:-3], False, f"{path.name} has {len(content) - 3} bytes, expected {len(content)}"),
        (bytes(flipped), True, f"{path.name} has changed"),
        (None, False, f"{path.name} is missing"),
    )
    for damaged, verify, problem in damages:
        path.write_bytes(damaged) if damaged is not None else path.unlink()
        assert problem in refusal(with_words, mmap=mmap, verify=verify)
        if role != "vectors" and (mmap or role != "table" or verify):
            with pytest.raises(RetrievalError, match=problem):
                BM25Retriever.load(with_words, mmap=mmap, verify=verify)


def test_another_embedding_model_is_refused_by_name(folder):
    message = refusal(folder, LetterEmbeddings("other:26"))
    assert "built with embedding model 'letters:26', not 'other:26'" in message


def test_a_missing_index_says_how_to_build_one(tmp_path):
    assert "there is no folder" in refusal(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "no index in" in refusal(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    assert "rag-posfix index" in refusal(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff\xfe", "is not text"),
        (b'{"name": "web app"}', "is not an index of rag-posfix"),
        (b"[]", "is not an index of rag-posfix"),
        (b'{"format": "rag-posfix-index", "version": 3}', "format version 3, this release reads 2"),
        (b'{"format": "rag-posfix-index", "version": 2}', "wrong fields: embedding, dimension, count, files"),
    ],
)
def test_a_damaged_or_foreign_manifest_is_explained(folder, content, problem):
    (folder / "manifest.json").write_bytes(content)
    assert problem in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"count": 4}, "holds 3 vectors of dimension 26 and 3 documents, the manifest says 4"),
        ({"files": {}}, "names no vectors file"),
        ({"files": {"vectors": {"name": "../x", "bytes": 1, "sha256": ""}}}, "wrong fields: files.vectors.name"),
    ],
)
def test_a_manifest_that_contradicts_its_files_or_names_others_is_refused(folder, changes, problem):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert problem in refusal(folder)


# Files whose hashes are right and whose contents are not.


def longer(vectors: bytes) -> bytes:
    """Vectors that claim to be a terabyte: header of the inner index, then the number of values."""
    position = vectors.index(b"IxFI") + 4 + 4 + 8 + 8 + 8 + 1 + 4
    return vectors[:position] + (2**38).to_bytes(8, "little") + vectors[position + 8 :]


def equal_keys(vectors: bytes) -> bytes:
    return vectors[:-16] + vectors[-24:-16] + vectors[-8:]  # the second key becomes the first


@pytest.mark.parametrize(
    ("role", "change", "problem"),
    [
        ("documents", b"{}\n", "holds a line that is not a document"),
        ("documents", b"\xff\n", "holds a line that is not a document"),
        ("documents", b'{"key":0,"id":"a","text":5,"metadata":{}}\n', "holds a line that is not a document"),
        ("documents", lambda lines: lines.replace(b'"key": 0', b'"key": 9'), "different keys"),
        ("vectors", b"nothing of faiss", "faiss cannot read"),
        ("vectors", longer, "faiss cannot read"),
        ("vectors", equal_keys, "contradict their keys"),
    ],
)
def test_documents_and_vectors_that_are_none_are_refused(folder, role, change, problem):
    forge_file(folder, role, change)
    assert problem in refusal(folder)
    assert faiss.get_deserialization_vector_byte_limit() >= 2**40


@pytest.mark.parametrize("line", [b"{broken", b"[1]", b"[" * 9000])
@pytest.mark.parametrize("mmap", [False, True])
def test_a_document_that_is_none_is_an_error_whenever_it_is_read(folder, line, mmap):
    def first_line(data: bytes) -> bytes:
        old = data.partition(b"\n")[0]
        return line[: len(old)].ljust(len(old)) + data[len(old) :]

    forge_file(folder, "documents", first_line)
    with pytest.raises(RetrievalError):
        list(read_entries(folder, mmap=mmap).values())


def array(header: str) -> bytes:
    """A .npy file with this header and no data."""
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def archive() -> bytes:
    out = io.BytesIO()
    np.savez(out, a=np.zeros(1))
    return out.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        array("{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999, 2), }"),
        array("{'descr': '|O', 'fortran_order': False, 'shape': (2, 2), }"),
        array("{'descr': '<i8', 'fortran_order': False, 'shape': (-1, 2), }"),
        array("((((((((((((((((((((((((((((((("),
        b"nothing of numpy",
        archive(),
    ],
    ids=range(6),
)
def test_an_array_that_is_none_is_an_error(with_words, content):
    for role in ("bm25_shares", "table"):
        forge_file(with_words, role, content)
        for mmap in (False, True):
            with pytest.raises(RetrievalError, match="holds no"):
                read_bm25(with_words, mmap=mmap)
    with pytest.raises(RetrievalError):
        list(read_entries(with_words, mmap=True).values())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (b"{}", "holds no words"),
        (b'{"k1": 0.9, "b": 0.4, "count": 3, "words": ["a"]}', "contradict each other"),
    ],
)
def test_words_that_are_none_are_refused(with_words, words, problem):
    forge_file(with_words, "bm25_words", words)
    with pytest.raises(RetrievalError, match=problem):
        BM25Retriever.load(with_words)


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
@pytest.mark.parametrize("mapped", [False, True])
def test_vectors_with_any_number_damaged_are_a_value_error_or_readable(kind, mapped, tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, 8)).astype(np.float32)
    index = VectorIndex(8, kind)
    index.add(np.arange(50, dtype=np.int64), rows / np.linalg.norm(rows, axis=1, keepdims=True))
    path = tmp_path / "vectors.faiss"
    faiss.write_index(index.stored, str(path))
    data, choose = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        position = choose.randrange(min(len(damaged), 160))
        number = choose.choice([0, 2**31, 2**39, 2**62, choose.getrandbits(64)])
        damaged[position : position + 8] = number.to_bytes(8, "little")
        path.write_bytes(damaged)
        try:
            read_vectors(path, mapped=mapped)
        except ValueError:
            refused += 1
    assert refused > 100


def failing(original, error, nth):
    """Return ``original``, which fails when it is called for the ``nth`` time."""
    calls = itertools.count(1)

    def call(*args):
        if next(calls) == nth:
            raise error
        return original(*args)

    return call


@pytest.mark.parametrize(
    ("module", "name", "nth"),
    [
        (storage, "write_vectors", 1),
        (storage, "write_document_lines", 1),
        (os, "fsync", 1),  # of the first data file
        (os, "fsync", 6),  # of the folder, after the data files were moved there: 3 files, manifest and staging before
        (Path, "replace", 1),
        (Path, "replace", 4),  # of the manifest, after the three data files
    ],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_a_save_that_is_interrupted_leaves_the_old_index(folder, embeddings, monkeypatch, module, name, nth, error):
    bigger = FaissVectorStore.from_texts(["x", "y", "z", "w"], embeddings)
    with monkeypatch.context() as patched:
        patched.setattr(module, name, failing(getattr(module, name), error, nth))
        with pytest.raises((KeyboardInterrupt, RetrievalError)):
            bigger.save(folder)
    assert len(FaissVectorStore.load(folder, embeddings)) == 3
    assert [path.name for path in folder.parent.iterdir()] == ["index"]
    assert len(list(folder.iterdir())) == 4
    bigger.save(folder)
    assert len(FaissVectorStore.load(folder, embeddings)) == 4


def test_a_first_save_that_is_interrupted_leaves_nothing_and_can_be_repeated(store, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", failing(Path.replace, KeyboardInterrupt, 1))
        with pytest.raises(KeyboardInterrupt):
            store.save(tmp_path / "index")
    assert list(tmp_path.iterdir()) == []
    store.save(tmp_path / "index")


def test_a_folder_with_other_content_is_never_written_to(store, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(RetrievalError, match="exists and is not an index"):
            store.save(target)
    with pytest.raises(RetrievalError, match="cannot write the index"):
        store.save(tmp_path / "thesis.txt" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_identity_of_a_model_without_one_is_its_class_and_name():
    class Named(DeterministicFakeEmbedding):
        model: str = "maker/text-embedding-3"

    assert embedding_identity(DeterministicFakeEmbedding(size=2)) == "DeterministicFakeEmbedding"
    assert embedding_identity(Named(size=2)) == "Named:text-embedding-3"


# What an index holds: files, passages, and the fields of the metadata.


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
def summarized(entries, tmp_path):
    store = FaissVectorStore(LetterEmbeddings())
    store.put_entries(entries, store.embed_texts([entry.document.page_content for entry in entries.values()]))
    store.save(tmp_path / "my.index")
    return tmp_path / "my.index"


def test_a_summary_has_the_passages_of_each_file_and_the_values_of_each_field(summarized):
    summary = summarize_index(summarized)
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
