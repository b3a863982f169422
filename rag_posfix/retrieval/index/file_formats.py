"""The file formats of an index: vectors, documents and word statistics, each with a writer and a reader.

A reader raises ``ValueError`` for a malformed file, whatever the reason; ``storage`` turns it into the error that the
user sees. Knows nothing of manifests and folders; nothing is pickled.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.index.bm25_index import BM25Index
from rag_posfix.retrieval.index.documents import IndexEntry, document_json
from rag_posfix.retrieval.index.vector_index import import_faiss
from rag_posfix.text import parse_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BM25_ROLES = ("bm25_words", "bm25_shares", "bm25_texts", "bm25_starts")
"""Roles of the files of word statistics: words and parameters as JSON, then three arrays of ``BM25Index`` (.npy)."""

_KEYS = 2**63
_MAGIC = b"\x93NUMPY"


def write_vectors(vectors: Any, path: Path) -> None:
    """Write a faiss index; OSError if it cannot be written."""
    try:
        import_faiss().write_index(vectors, str(path))
    except RuntimeError as error:
        raise OSError(f"faiss could not write the vectors: {str(error).splitlines()[0]}") from error


def read_vectors(path: Path, *, mapped: bool) -> Any:
    """Return an ``IndexIDMap2`` over a flat index or a graph; with ``mapped``, its numbers stay in the file."""
    faiss = import_faiss()
    try:
        with _bounded_by(faiss, path.stat().st_size):
            vectors = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mapped else 0)
    except (RuntimeError, MemoryError) as error:
        raise ValueError(f"faiss cannot read {path.name}") from error
    if not isinstance(vectors, faiss.IndexIDMap2):
        raise ValueError(f"{path.name} holds a {type(vectors).__name__}, expected an IndexIDMap2")
    inner = faiss.downcast_index(vectors.index)
    kinds = (faiss.IndexFlat, faiss.IndexHNSWFlat)
    if not isinstance(inner, kinds) or inner.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"{path.name} holds a {type(inner).__name__}, expected inner products, flat or as a graph")
    keys = faiss.vector_to_array(vectors.id_map)
    if not (vectors.ntotal == inner.ntotal == len(keys) and vectors.d == inner.d and (keys[1:] > keys[:-1]).all()):
        raise ValueError(f"{path.name} holds vectors that contradict their keys")
    return vectors


@contextmanager
def _bounded_by(faiss: Any, n_bytes: int) -> Iterator[None]:
    """Let faiss allocate no array larger than its file: a damaged length would take all memory."""
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):  # before faiss 1.14
        yield
        return
    before = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(n_bytes)
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(before)


def write_document_lines(entries: Mapping[int, IndexEntry], path: Path, offsets: Path) -> None:
    """Write documents as JSON lines to ``path``, and the key and byte offset of each line to ``offsets``.

    Raises:
        RetrievalError: the metadata of a document cannot be written as JSON.
    """
    import numpy as np

    rows: list[tuple[int, int]] = []
    offset = 0
    with path.open("wb") as handle:
        for key, entry in entries.items():
            rows.append((key, offset))
            offset += handle.write(_document_line(key, entry).encode() + b"\n")
    np.save(offsets, np.asarray(rows, dtype="<i8").reshape(-1, 2), allow_pickle=False)


def read_document_lines(path: Path) -> dict[int, IndexEntry]:
    """Return all documents by key, in the order of the file."""
    try:
        with path.open("rb") as handle:
            return dict(_parse_document(line) for line in handle)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} holds a line that is not a document") from error


def read_offsets(path: Path) -> NDArray[np.int64]:
    """Return key and byte offset of each document, one row per document; both columns ascend."""
    offsets = _load_array(path, mapped=False)
    shaped = offsets.ndim == 2 and offsets.shape[1] == 2 and offsets.dtype.str == "<i8"
    if not shaped or (offsets[1:] <= offsets[:-1]).any():
        raise ValueError(f"{path.name} holds no table of keys and byte offsets")
    return offsets


class MappedDocuments(Mapping[int, IndexEntry]):
    """Documents by key that stay in a memory-mapped file of lines and are parsed on access."""

    def __init__(self, path: Path, offsets: NDArray[np.int64]) -> None:
        self._name = path.name
        self._keys, self._offsets = offsets[:, 0].copy(), offsets[:, 1].copy()
        with path.open("rb") as handle:  # an empty file cannot be mapped
            self._lines: Any = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if len(offsets) else b""

    def __getitem__(self, key: int) -> IndexEntry:
        row = int(self._keys.searchsorted(key))
        if row == len(self._keys) or self._keys[row] != key:
            raise KeyError(key)
        end = int(self._offsets[row + 1]) if row + 1 < len(self._offsets) else len(self._lines)
        try:
            stored_key, entry = _parse_document(self._lines[int(self._offsets[row]) : end])
            if stored_key != key:
                raise ValueError("another key")
        except (ValueError, KeyError, TypeError) as error:
            raise RetrievalError(
                f"{self._name} does not hold document {key} where its table says; build the index again"
            ) from error
        return entry

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys.tolist())

    def __len__(self) -> int:
        return len(self._keys)


def write_bm25_files(index: BM25Index, paths: Mapping[str, Path]) -> None:
    """Write word statistics, one file for each of ``BM25_ROLES``."""
    import numpy as np

    fields: dict[str, Any] = {"version": index.words_version, "k1": index.k1, "b": index.b, "count": len(index)}
    fields["words"] = list(index.words)
    paths["bm25_words"].write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")
    arrays = (("bm25_shares", index.term_scores), ("bm25_texts", index.texts), ("bm25_starts", index.starts))
    for role, array in arrays:
        np.save(paths[role], array, allow_pickle=False)


def read_bm25_files(paths: Mapping[str, Path], *, mapped: bool) -> BM25Index:
    """Return word statistics that ``write_bm25_files`` wrote; with ``mapped``, the arrays stay in the files."""
    try:
        fields = json.loads(paths["bm25_words"].read_text(encoding="utf-8"))
        words = {str(word): row for row, word in enumerate(fields["words"])}
        k1, b, count = float(fields["k1"]), float(fields["b"]), int(fields["count"])
        version = int(fields.get("version", 1))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{paths['bm25_words'].name} holds no words") from error
    term_scores, texts, starts = (_load_array(paths[role], mapped=mapped) for role in BM25_ROLES[1:])
    if not (
        [array.dtype.str for array in (term_scores, texts, starts)] == ["<f4", "<i4", "<i8"]
        and (term_scores.ndim, texts.shape, starts.shape) == (1, term_scores.shape, (len(words) + 1,))
        and starts[0] == 0
        and starts[-1] == len(term_scores)
        and (starts[1:] >= starts[:-1]).all()
        # Not checked for mapped arrays, because it would read all of them.
        and (mapped or not len(texts) or (texts.min() >= 0 and texts.max() < count))
    ):
        raise ValueError("its word statistics contradict each other")
    return BM25Index(words, term_scores, texts, starts, count, k1=k1, b=b, words_version=version)


def _load_array(path: Path, *, mapped: bool) -> NDArray[Any]:
    import numpy as np

    try:
        with path.open("rb") as handle:
            if handle.read(len(_MAGIC)) != _MAGIC:  # numpy would read archives and pickles, too
                raise ValueError("no array")
        array: NDArray[Any] = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    # A hostile header makes numpy raise any of these.
    except (ValueError, EOFError, MemoryError, OverflowError, SyntaxError, TypeError, TokenError) as error:
        raise ValueError(f"{path.name} holds no array") from error
    return array


def _document_line(key: int, entry: IndexEntry) -> str:
    document = entry.document
    fields: dict[str, Any] = {
        "key": key, "id": document.id, "text": document.page_content, "metadata": document.metadata,
    }  # fmt: skip
    if entry.files:
        fields["files"] = list(entry.files)
    return document_json(document, fields)


def _parse_document(line: bytes) -> tuple[int, IndexEntry]:
    fields = parse_json(line.decode())
    key, files = fields["key"], fields.get("files", [])
    if not isinstance(key, int) or not 0 <= key < _KEYS or not isinstance(files, list):
        raise TypeError("key or files")
    document = Document(id=fields["id"], page_content=fields["text"], metadata=fields["metadata"])
    return key, IndexEntry(document, tuple(str(file) for file in files))
