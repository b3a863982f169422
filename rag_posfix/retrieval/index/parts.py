"""The files that an index is made of, each with one function that writes it and one that reads it.

A reader raises ``ValueError`` where a file does not hold what it should, whatever the reason; ``index_files`` says so
to the user. Knows nothing of manifests and folders; nothing is pickled.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from rag_posfix.retrieval.index.bm25_statistics import BM25Index
from rag_posfix.retrieval.index.documents import Record
from rag_posfix.retrieval.index.records import dump_record, parse_json
from rag_posfix.retrieval.index.vectors import import_faiss

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "BM25_ROLES",
    "map_records",
    "read_bm25_parts",
    "read_records_file",
    "read_table",
    "read_vectors",
    "write_bm25_parts",
    "write_records",
    "write_vectors",
]

BM25_ROLES = ("bm25_words", "bm25_shares", "bm25_texts", "bm25_starts")
"""Word statistics: the words and parameters as JSON, the arrays of ``BM25Index`` as numpy writes them."""


def write_vectors(vectors: Any, path: Path) -> None:
    """Write what faiss holds.

    Raises:
        OSError: it cannot be written.
    """
    try:
        import_faiss().write_index(vectors, str(path))
    except RuntimeError as error:
        raise OSError(f"faiss could not write the vectors: {str(error).splitlines()[0]}") from error


def read_vectors(path: Path, *, mapped: bool) -> Any:
    """Return an ``IndexIDMap2`` over a flat index or a graph; mapped, its numbers stay in the file."""
    faiss = import_faiss()
    try:
        vectors = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mapped else 0)
    except RuntimeError as error:
        raise ValueError(f"faiss cannot read {path.name}") from error
    if not isinstance(vectors, faiss.IndexIDMap2):
        raise ValueError(f"{path.name} holds a {type(vectors).__name__}, expected an IndexIDMap2")
    inner = faiss.downcast_index(vectors.index)
    kinds = (faiss.IndexFlat, faiss.IndexHNSWFlat)
    if not isinstance(inner, kinds) or inner.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"{path.name} holds a {type(inner).__name__}, expected inner products, flat or as a graph")
    return vectors


def write_records(records: Mapping[int, Record], path: Path, table: Path) -> None:
    """Write documents as JSON lines to ``path``, and the key and first byte of each line to ``table``.

    Raises:
        RetrievalError: a document has no JSON form.
    """
    import numpy as np

    places: list[tuple[int, int]] = []
    at = 0
    with path.open("wb") as handle:
        for key, record in records.items():
            document = record.document
            content, metadata = document.page_content, document.metadata
            fields: dict[str, Any] = {"key": key, "id": document.id, "text": content, "metadata": metadata}
            if record.files:
                fields["files"] = list(record.files)
            places.append((key, at))
            at += handle.write(dump_record(fields).encode() + b"\n")
    np.save(table, np.asarray(places, dtype="<i8").reshape(-1, 2), allow_pickle=False)


def read_records_file(path: Path) -> dict[int, Record]:
    """Return all documents by key, in the order of the file."""
    try:
        with path.open("rb") as handle:
            return dict(_parse_record(line) for line in handle)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} holds a line that is not a document") from error


def read_table(path: Path) -> NDArray[np.int64]:
    """Return keys and first bytes, one row per document; both ascend."""
    table = _load_array(path, mapped=False)
    if table.ndim != 2 or table.shape[1] != 2 or table.dtype.str != "<i8" or (table[1:] <= table[:-1]).any():
        raise ValueError(f"{path.name} is no table of keys and places")
    return table


def map_records(path: Path, table: NDArray[np.int64]) -> Mapping[int, Record]:
    """Return documents by key that are read from the file as they are asked for.

    Args:
        path: What ``write_records`` wrote.
        table: What ``read_table`` returned for it.
    """
    return _MappedRecords(path, table)


class _MappedRecords(Mapping[int, Record]):
    def __init__(self, path: Path, table: NDArray[np.int64]) -> None:
        self._name = path.name
        self._keys, self._starts = table[:, 0].copy(), table[:, 1].copy()
        with path.open("rb") as handle:  # an empty file cannot be mapped
            self._lines: Any = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if len(table) else b""

    def __getitem__(self, key: int) -> Record:
        row = int(self._keys.searchsorted(key))
        if row == len(self._keys) or self._keys[row] != key:
            raise KeyError(key)
        end = int(self._starts[row + 1]) if row + 1 < len(self._starts) else len(self._lines)
        found, record = _parse_record(self._lines[int(self._starts[row]) : end])
        if found != key:
            raise ValueError(f"{self._name} has another document than key {key} in its place")
        return record

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys.tolist())

    def __len__(self) -> int:
        return len(self._keys)


def write_bm25_parts(index: BM25Index, paths: Mapping[str, Path]) -> None:
    """Write word statistics to a path for each of ``BM25_ROLES``."""
    import numpy as np

    words = {"k1": index.k1, "b": index.b, "count": len(index), "words": list(index.words)}
    paths["bm25_words"].write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
    arrays = (("bm25_shares", index.shares), ("bm25_texts", index.texts), ("bm25_starts", index.starts))
    for role, array in arrays:
        np.save(paths[role], array, allow_pickle=False)


def read_bm25_parts(paths: Mapping[str, Path], *, mapped: bool) -> BM25Index:
    """Return what ``write_bm25_parts`` wrote; mapped, its arrays stay in the files."""
    try:
        kept = json.loads(paths["bm25_words"].read_text(encoding="utf-8"))
        words = {str(word): row for row, word in enumerate(kept["words"])}
        k1, b, count = float(kept["k1"]), float(kept["b"]), int(kept["count"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{paths['bm25_words'].name} holds no words") from error
    shares, texts, starts = (_load_array(paths[role], mapped=mapped) for role in BM25_ROLES[1:])
    if not (
        [array.dtype.str for array in (shares, texts, starts)] == ["<f4", "<i4", "<i8"]
        and (shares.ndim, texts.shape, starts.shape) == (1, shares.shape, (len(words) + 1,))
        and starts[0] == 0
        and starts[-1] == len(shares)
        and (starts[1:] >= starts[:-1]).all()
        and (mapped or not len(texts) or (texts.min() >= 0 and texts.max() < count))  # that would read them all
    ):
        raise ValueError("its word statistics contradict each other")
    return BM25Index(words, shares, texts, starts, count, k1=k1, b=b)


def _load_array(path: Path, *, mapped: bool) -> NDArray[Any]:
    import numpy as np

    try:
        found: NDArray[Any] = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path.name} holds no array") from error
    return found


def _parse_record(line: bytes) -> tuple[int, Record]:
    record = parse_json(line.decode())
    key, files = record["key"], record.get("files", [])
    if not isinstance(key, int) or not isinstance(files, list):
        raise TypeError("key or files")
    document = Document(id=record["id"], page_content=record["text"], metadata=record["metadata"])
    return key, Record(document, tuple(str(file) for file in files))
