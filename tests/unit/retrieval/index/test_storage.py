import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index import storage
from rag_posfix.retrieval.index.storage import read_manifest
from tests.support.letter_embeddings import LetterEmbeddings


@pytest.fixture
def folder(store, tmp_path):
    store.save(tmp_path / "index")
    return tmp_path / "index"


def data_file(folder, role):
    return folder / read_manifest(folder).files[role].name


def refusal(folder, embeddings=None):
    with pytest.raises(RetrievalError) as caught:
        FaissVectorStore.load(folder, embeddings or LetterEmbeddings())
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


def test_a_loaded_store_can_be_changed_and_saved_again(folder, embeddings):
    store = FaissVectorStore.load(folder, embeddings)
    store.delete(["one"])
    store.add_texts(["ccc", "bab"], ids=["four", "two"])
    store.save(folder)
    again = FaissVectorStore.load(folder, embeddings)
    assert [document.id for document in again.similarity_search("ccc", k=3)] == ["four", "three", "two"]
    assert again.similarity_search("bba", k=1)[0].page_content == "bab"
    assert len(list(folder.iterdir())) == 4


def test_an_index_can_be_moved(folder, embeddings, tmp_path):
    shutil.move(folder, tmp_path / "elsewhere")
    assert len(FaissVectorStore.load(tmp_path / "elsewhere", embeddings)) == 3


def test_an_empty_store_can_be_saved_and_loaded(embeddings, tmp_path):
    FaissVectorStore(embeddings).save(tmp_path / "index")
    assert FaissVectorStore.load(tmp_path / "index", embeddings).similarity_search("a") == []


def test_an_existing_empty_folder_is_used(store, tmp_path):
    store.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_the_manifest_holds_no_path_of_this_machine(folder, tmp_path):
    assert str(tmp_path) not in (folder / "manifest.json").read_text()


@pytest.mark.parametrize("role", ["vectors", "documents"])
def test_a_truncated_file_is_named(folder, role):
    path = data_file(folder, role)
    path.write_bytes(path.read_bytes()[:-3])
    assert f"{path.name} has {path.stat().st_size} bytes, expected" in refusal(folder)


@pytest.mark.parametrize("role", ["vectors", "documents"])
def test_a_flipped_byte_is_found(folder, role):
    path = data_file(folder, role)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert f"{path.name} has changed" in refusal(folder)


@pytest.mark.parametrize("role", ["vectors", "documents"])
def test_a_missing_file_is_named(folder, role):
    path = data_file(folder, role)
    path.unlink()
    assert f"{path.name} is missing" in refusal(folder)


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
        (b'{"format": "rag-posfix-index", "version": 3}', "format version 3, this release reads 1 and 2"),
        (
            b'{"format": "rag-posfix-index", "version": 1}',
            "missing or wrong fields: embedding, dimension, count, files",
        ),
    ],
)
def test_a_damaged_or_foreign_manifest_is_explained(folder, content, problem):
    (folder / "manifest.json").write_bytes(content)
    assert problem in refusal(folder)


def rewrite(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_manifest_that_contradicts_its_files_is_refused(folder):
    rewrite(folder, count=4)
    assert "holds 3 vectors of dimension 26 and 3 documents, the manifest says 4" in refusal(folder)
    rewrite(folder, files={})
    assert "names no vectors file" in refusal(folder)


def test_a_manifest_cannot_name_files_outside_of_its_folder(folder):
    rewrite(folder, files={"vectors": {"name": "../x", "bytes": 1, "sha256": ""}})
    assert "wrong fields: files.vectors.name" in refusal(folder)


def forge(folder, role, data):
    """Replace a file and make the manifest agree with it."""
    path = data_file(folder, role)
    path.write_bytes(data)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    rewrite(folder, files={**files, role: storage.describe_file(path).model_dump()})


@pytest.mark.parametrize("line", [b"{}\n", b"[]\n", b"x\n", b"\xff\n", b'{"key":0,"id":"a","text":5,"metadata":{}}\n'])
def test_documents_that_are_none_are_refused(folder, line):
    forge(folder, "documents", line)
    assert "holds a line that is not a document" in refusal(folder)


def test_vectors_that_are_none_are_refused(folder):
    forge(folder, "vectors", b"nothing of faiss")
    assert "faiss cannot read" in refusal(folder)


def test_documents_with_keys_of_other_vectors_are_refused(folder):
    lines = data_file(folder, "documents").read_bytes().replace(b'"key": 0', b'"key": 9')
    forge(folder, "documents", lines)
    assert "different keys" in refusal(folder)


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
    def fail(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            store.save(tmp_path / "index")
    assert list(tmp_path.iterdir()) == []
    store.save(tmp_path / "index")


def test_a_save_into_an_empty_folder_that_was_stopped_can_be_repeated(store, embeddings, tmp_path):
    (tmp_path / "vectors-0123456789ab.faiss").write_bytes(b"left over")
    store.save(tmp_path)
    assert len(FaissVectorStore.load(tmp_path, embeddings)) == 3


def test_a_folder_with_other_content_is_never_written_to(store, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for target in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(RetrievalError, match="exists and is not an index"):
            store.save(target)
    with pytest.raises(RetrievalError, match="cannot write the index"):
        store.save(tmp_path / "thesis.txt" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_metadata_that_json_cannot_hold_is_refused_and_nothing_written(embeddings, tmp_path):
    store = FaissVectorStore.from_texts(["x"], embeddings, [{"when": object()}], ids=["a"])
    with pytest.raises(RetrievalError, match="document 'a' has metadata that JSON cannot hold"):
        store.save(tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_the_identity_of_a_model_without_one_is_its_class_and_name():
    class Named(DeterministicFakeEmbedding):
        model: str = "maker/text-embedding-3"

    assert embedding_identity(DeterministicFakeEmbedding(size=2)) == "DeterministicFakeEmbedding"
    assert embedding_identity(Named(size=2)) == "Named:text-embedding-3"
