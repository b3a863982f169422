"""Index files whose hashes are right and whose contents are not. All of them end in an error of rag_posfix."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.file_formats import read_vectors
from rag_posfix.retrieval.index.storage import describe_file, read_bm25, read_entries, read_manifest
from rag_posfix.retrieval.index.vector_index import VectorIndex
from tests.support.letter_embeddings import LetterEmbeddings


def replaced(folder: Path, role: str, change: Callable[[bytes], bytes]) -> None:
    """Change a data file and correct the manifest, as someone does who makes an index to do harm."""
    manifest = read_manifest(folder)
    path = folder / manifest.files[role].name
    path.write_bytes(change(path.read_bytes()))
    files = {**manifest.files, role: describe_file(path)}
    (folder / "manifest.json").write_text(manifest.model_copy(update={"files": files}).model_dump_json())


def array(header: str) -> bytes:
    """A .npy file with this header and no data."""
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def archive() -> bytes:
    out = io.BytesIO()
    np.savez(out, a=np.zeros(1))
    return out.getvalue()


@pytest.fixture
def folder(store: FaissVectorStore, tmp_path: Path) -> Path:
    store.save(tmp_path / "index")
    return tmp_path / "index"


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
@pytest.mark.parametrize("mapped", [False, True])
def test_vectors_with_any_number_damaged_are_a_value_error_or_readable(kind: str, mapped: bool, tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, 8)).astype(np.float32)
    index = VectorIndex(8, kind)  # type: ignore[arg-type]
    index.add(np.arange(50, dtype=np.int64), rows / np.linalg.norm(rows, axis=1, keepdims=True))
    path = tmp_path / "vectors.faiss"
    faiss.write_index(index.stored, str(path))
    data, choose = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        at = choose.randrange(min(len(damaged), 160))
        damaged[at : at + 8] = choose.choice([0, 2**31, 2**39, 2**62, choose.getrandbits(64)]).to_bytes(8, "little")
        path.write_bytes(damaged)
        try:
            read_vectors(path, mapped=mapped)
        except ValueError:
            refused += 1
    assert refused > 100


def test_a_length_of_a_terabyte_is_not_allocated(folder: Path):
    def longer(data: bytes) -> bytes:
        at = data.index(b"IxFI") + 4 + 4 + 8 + 8 + 8 + 1 + 4  # header of the inner index, then the number of values
        return data[:at] + (2**38).to_bytes(8, "little") + data[at + 8 :]

    replaced(folder, "vectors", longer)
    with pytest.raises(RetrievalError, match="faiss cannot read"):
        FaissVectorStore.load(folder, LetterEmbeddings())
    assert faiss.get_deserialization_vector_byte_limit() >= 2**40


def test_keys_that_contradict_the_vectors_are_damage(folder: Path):
    def twice(data: bytes) -> bytes:
        return data[:-16] + data[-24:-16] + data[-8:]  # the second key becomes the first

    replaced(folder, "vectors", twice)
    with pytest.raises(RetrievalError, match="contradict their keys"):
        FaissVectorStore.load(folder, LetterEmbeddings())


@pytest.mark.parametrize(
    "line",
    [b"{broken", b"[1]", b"7", b'{"key": 99999999999999999999, "id": "a", "text": "t", "metadata": {}}', b"[" * 9000],
)
@pytest.mark.parametrize("mmap", [False, True])
def test_a_document_that_is_none_is_told_whenever_it_is_read(folder: Path, line: bytes, mmap: bool):
    def first_line(data: bytes) -> bytes:
        old = data.partition(b"\n")[0]
        return line[: len(old)].ljust(len(old)) + data[len(old) :]

    replaced(folder, "documents", first_line)
    with pytest.raises(RetrievalError):
        list(read_entries(folder, mmap=mmap).values())


@pytest.mark.parametrize(
    "content",
    [
        array("{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999, 2), }"),
        array("{'descr': '<i8', 'fortran_order': False, 'shape': (9999999999999999999999, 2), }"),
        array("{'descr': '|O', 'fortran_order': False, 'shape': (2, 2), }"),
        array("{'descr': '<i8', 'fortran_order': False, 'shape': (-1, 2), }"),
        array("((((((((((((((((((((((((((((((("),
        b"PK\x03\x04 no archive",
        b"",
        archive(),
    ],
)
@pytest.mark.parametrize("mmap", [False, True])
def test_an_array_that_is_none_is_told(store: FaissVectorStore, tmp_path: Path, content: bytes, mmap: bool):
    folder = tmp_path / "index"
    store.save(folder)
    replaced(folder, "table", lambda _: content)
    with pytest.raises(RetrievalError):
        list(read_entries(folder, mmap=True).values())
    if "bm25_texts" in read_manifest(folder).files:
        replaced(folder, "bm25_texts", lambda _: content)
        with pytest.raises(RetrievalError):
            read_bm25(folder, mmap=mmap)
