"""Reads an index that ``index_files`` wrote, after checking that it is whole. Knows nothing of searching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.index.bm25_statistics import BM25Index
from rag_posfix.retrieval.index.documents import Record
from rag_posfix.retrieval.index.manifest import (
    REBUILD,
    IndexContents,
    IndexManifest,
    damaged,
    describe_file,
    read_manifest,
)
from rag_posfix.retrieval.index.parts import (
    BM25_ROLES,
    map_records,
    read_bm25_parts,
    read_records_file,
    read_table,
    read_vectors,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["read_bm25", "read_index", "read_records"]


def read_index(folder: Path, embedding: str, *, mmap: bool = False, verify: bool = True) -> IndexContents:
    """Read vectors and documents after checking that they are whole and were built with the model ``embedding``.

    Args:
        folder: Of the index.
        embedding: Identity of the embedding model.
        mmap: Leave vectors and documents in their files, to be read as they are needed; the records are then no dict.
            An index of the first version is read whole.
        verify: Compare files with their hashes, not with their sizes alone.

    Raises:
        RetrievalError: it is missing, damaged, of another program or version, or of another embedding model.
    """
    manifest = read_manifest(folder)
    if manifest.embedding != embedding:
        raise RetrievalError(
            f"index {str(folder)!r} was built with embedding model {manifest.embedding!r}, not {embedding!r}; "
            f"use that model, or {REBUILD}"
        )
    for role in manifest.files:  # those too that are not read here: a damaged index is not used at all
        _checked_file(folder, manifest, role, verify)
    path = _checked_file(folder, manifest, "vectors", False)
    records = _records(folder, manifest, mmap, False)
    with _damage(folder):
        # Documents that can be changed need vectors that can: faiss ends the process where mapped ones are added to.
        vectors = read_vectors(path, mapped=mmap and not isinstance(records, dict))
    found = IndexContents(vectors, records, manifest.embedding)
    count, removed = len(records), found.removed()
    if manifest.count != count or manifest.dimension != vectors.d or manifest.removed + count != vectors.ntotal:
        raise damaged(
            folder,
            f"it holds {vectors.ntotal} vectors of dimension {vectors.d} and {count} documents, the manifest says "
            f"{manifest.count + manifest.removed} of dimension {manifest.dimension} and {manifest.count}",
        )
    if len(removed) != manifest.removed:
        raise damaged(folder, "its vectors and its documents have different keys")
    return found


def read_records(folder: Path, *, mmap: bool = False, verify: bool = True) -> Mapping[int, Record]:
    """Read the documents alone, for which no embedding model is needed.

    Args:
        folder: Of the index.
        mmap: As for ``read_index``.
        verify: As for ``read_index``.

    Raises:
        RetrievalError: the index is missing, damaged, or of another program or version.
    """
    manifest = read_manifest(folder)
    records = _records(folder, manifest, mmap, verify)
    if len(records) != manifest.count:
        raise damaged(folder, f"it holds {len(records)} documents, the manifest says {manifest.count}")
    return records


def read_bm25(folder: Path, *, mmap: bool = False, verify: bool = True) -> tuple[NDArray[np.int64], BM25Index] | None:
    """Read the word statistics and the keys of the documents that they are of, or return None where there are none.

    Args:
        folder: Of the index.
        mmap: As for ``read_index``.
        verify: As for ``read_index``.

    Raises:
        RetrievalError: the index is missing, damaged, or of another program or version.
    """
    manifest = read_manifest(folder)
    if not any(role in manifest.files for role in BM25_ROLES):
        return None
    paths = {role: _checked_file(folder, manifest, role, verify) for role in BM25_ROLES}
    table = _checked_file(folder, manifest, "table", verify)
    with _damage(folder):
        keys, index = read_table(table)[:, 0], read_bm25_parts(paths, mapped=mmap)
    if not len(keys) == len(index) == manifest.count:
        raise damaged(folder, f"its word statistics are of {len(index)} documents, it holds {manifest.count}")
    return keys, index


def _checked_file(folder: Path, manifest: IndexManifest, role: str, verify: bool) -> Path:
    expected = manifest.files.get(role)
    if expected is None:
        raise damaged(folder, f"the manifest names no {role} file")
    path = folder / expected.name
    try:
        size = path.stat().st_size
        digest = describe_file(path).sha256 if verify and size == expected.bytes else None
    except FileNotFoundError:
        raise damaged(folder, f"{expected.name} is missing") from None
    except OSError as error:
        raise RetrievalError(f"cannot read {expected.name} of {str(folder)!r}: {error.strerror or error}") from error
    if size != expected.bytes:
        raise damaged(folder, f"{expected.name} has {size} bytes, expected {expected.bytes}")
    if verify and digest != expected.sha256:
        raise damaged(folder, f"{expected.name} has changed (its sha256 does not match the manifest)")
    return path


def _records(folder: Path, manifest: IndexManifest, mapped: bool, verify: bool) -> Mapping[int, Record]:
    path = _checked_file(folder, manifest, "documents", verify)
    with _damage(folder):
        if mapped and "table" in manifest.files:
            return map_records(path, read_table(_checked_file(folder, manifest, "table", verify)))
        return read_records_file(path)


@contextmanager
def _damage(folder: Path) -> Iterator[None]:
    """Say of which index a file is that does not hold what it should."""
    try:
        yield
    except ValueError as error:
        raise damaged(folder, str(error)) from error
    except OSError as error:
        raise RetrievalError(f"cannot read the index {str(folder)!r}: {error.strerror or error}") from error
