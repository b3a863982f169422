"""An index as a folder: ``manifest.json``, the vectors as faiss writes them, the documents as JSON lines, and more.

The manifest names the other files and their hashes, and is the last to be put in place. Each save writes new
file names, so that a folder is one complete index at every moment, whenever the process is stopped. Word statistics
are a part that may be missing. Knows nothing of embedding models or searching; what is in a file is known to
``index_parts``, and ``index_reading`` puts it together again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.index.bm25_statistics import BM25Index
from rag_posfix.retrieval.index.documents import Record
from rag_posfix.retrieval.index.parts import BM25_ROLES, write_bm25_parts, write_records, write_vectors
from rag_posfix.retrieval.index.vectors import import_faiss

__all__ = [
    "REBUILD",
    "IndexContents",
    "IndexFile",
    "IndexManifest",
    "check_writable",
    "damaged",
    "describe_file",
    "read_manifest",
    "write_index",
]

_FORMAT: Final = "rag-posfix-index"
_VERSION = 2
_READABLE = (1, 2)
"""Version 1 had neither a table nor vectors of removed documents in a graph."""
_MANIFEST = "manifest.json"
_DATA_FILE = re.compile(r"\w+-[0-9a-f]{12}\.(faiss|jsonl|json|npy)")
REBUILD: Final = "build the index again with: rag-posfix index PATH... --out DIR --rebuild"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class IndexFile(_Frozen):
    """One file of an index, with what it must hold."""

    name: str = Field(pattern=r"^\w[\w.-]*$")
    bytes: int = Field(ge=0)
    sha256: str


class IndexManifest(_Frozen):
    """What an index is and was built with.

    Attributes:
        format: Always ``rag-posfix-index``.
        version: Of the format.
        embedding: Identity of the embedding model.
        dimension: Length of a vector.
        count: Number of documents.
        removed: Number of vectors in a graph whose documents are gone.
        files: ``vectors``, ``documents``, ``table``, and those of ``BM25_ROLES`` where there are word statistics.
    """

    format: Literal["rag-posfix-index"] = _FORMAT
    version: int = _VERSION
    embedding: str
    dimension: int = Field(ge=1)
    count: int = Field(ge=0)
    removed: int = Field(default=0, ge=0)
    files: dict[str, IndexFile]


@dataclass(frozen=True, slots=True)
class IndexContents:
    """What is kept of an index.

    Attributes:
        vectors: A faiss index whose keys are those of ``records``, and maybe some of removed documents.
        records: Documents by key, ascending.
        embedding: Identity of the embedding model.
        bm25: Word statistics, a row for each document, or None.
    """

    vectors: Any
    records: Mapping[int, Record]
    embedding: str
    bm25: BM25Index | None = None

    def removed(self) -> set[int]:
        """Return the keys of vectors whose documents are gone."""
        import numpy as np

        stored = import_faiss().vector_to_array(self.vectors.id_map)
        kept = np.fromiter(self.records, dtype=np.int64, count=len(self.records))
        return set(np.setdiff1d(stored, kept, assume_unique=True).tolist())


def write_index(folder: Path, contents: IndexContents) -> IndexManifest:
    """Write an index, replacing one that is there in a single step.

    Args:
        folder: New, empty, or an index already.
        contents: What to write.

    Raises:
        RetrievalError: the folder holds something else, a document has no JSON form, or writing failed.
    """
    folder = Path(os.path.realpath(folder))
    check_writable(folder)
    token = uuid.uuid4().hex[:12]
    staging = folder.parent / f".{folder.name}.{token}.partial"
    try:
        staging.mkdir(parents=True)
        manifest = _stage(staging, contents, token)
        _publish(staging, folder)
    except OSError as error:
        raise RetrievalError(f"cannot write the index {str(folder)!r}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return manifest


def read_manifest(folder: Path) -> IndexManifest:
    """Return the manifest of the index in ``folder``.

    Raises:
        RetrievalError: there is none, or it is not one of ours.
    """
    try:
        text = (folder / _MANIFEST).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise RetrievalError(f"no index in {str(folder)!r} ({_MANIFEST} is missing); {REBUILD}") from None
    except UnicodeDecodeError:
        raise damaged(folder, f"{_MANIFEST} is not text") from None
    except OSError as error:
        raise RetrievalError(f"cannot read the index {str(folder)!r}: {error.strerror or error}") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise damaged(folder, f"{_MANIFEST} is not JSON") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise RetrievalError(f"{str(folder)!r} is not an index of rag-posfix; give the folder of one, or {REBUILD}")
    if data.get("version") not in _READABLE:
        known = " and ".join(map(str, _READABLE))
        raise RetrievalError(
            f"index {str(folder)!r} has format version {data.get('version')!r}, this release reads {known}; "
            f"install the release that wrote it, or {REBUILD}"
        )
    try:
        return IndexManifest.model_validate(data)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, item["loc"])) for item in error.errors())
        raise damaged(folder, f"{_MANIFEST} has missing or wrong fields: {fields}") from None


def check_writable(folder: Path) -> None:
    """Refuse a target that holds something other than an index, before any work is done for it.

    Raises:
        RetrievalError: ``folder`` is a file, or a folder with other content.
    """
    try:
        # Data files without a manifest are what a save that was stopped leaves in a folder that was empty.
        if not folder.exists() or (
            folder.is_dir() and all(_DATA_FILE.fullmatch(path.name) for path in folder.iterdir())
        ):
            return
    except OSError as error:
        raise RetrievalError(f"cannot write the index {str(folder)!r}: {error.strerror or error}") from error
    try:
        read_manifest(folder)
    except RetrievalError as error:
        raise RetrievalError(
            f"{str(folder)!r} exists and is not an index that can be replaced; choose another folder, or remove it"
        ) from error


def _stage(staging: Path, contents: IndexContents, token: str) -> IndexManifest:
    paths = {
        "vectors": staging / f"vectors-{token}.faiss",
        "documents": staging / f"documents-{token}.jsonl",
        "table": staging / f"table-{token}.npy",
    }
    write_vectors(contents.vectors, paths["vectors"])
    write_records(contents.records, paths["documents"], paths["table"])
    if contents.bm25 is not None:
        statistics = {role: staging / f"{role}-{token}.npy" for role in BM25_ROLES}
        statistics["bm25_words"] = staging / f"bm25_words-{token}.json"
        write_bm25_parts(contents.bm25, statistics)
        paths |= statistics
    manifest = IndexManifest(
        embedding=contents.embedding,
        dimension=contents.vectors.d,
        count=len(contents.records),
        removed=contents.vectors.ntotal - len(contents.records),
        files={role: describe_file(path) for role, path in paths.items()},
    )
    (staging / _MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for path in (*paths.values(), staging / _MANIFEST, staging):
        _sync(path)
    return manifest


def _publish(staging: Path, folder: Path) -> None:
    if not folder.exists():
        staging.replace(folder)
        _sync(folder.parent)
        return
    before = _live_files(folder)
    manifest = staging / _MANIFEST
    data = [path for path in staging.iterdir() if path != manifest]
    try:
        # The manifest goes last: until then the folder is the old index, from then on the new one.
        for path in data:
            path.replace(folder / path.name)
        _sync(folder)
        manifest.replace(folder / _MANIFEST)
        _sync(folder)
    finally:
        # Of the old and the new files one half is not named any more. Others may belong to a save beside this one.
        for name in (before | {path.name for path in data}) - _live_files(folder):
            (folder / name).unlink(missing_ok=True)


def _live_files(folder: Path) -> set[str]:
    if not (folder / _MANIFEST).exists():
        return set()
    return {file.name for file in read_manifest(folder).files.values()}


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_file(path: Path) -> IndexFile:
    """Return name, size and hash of a file."""
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return IndexFile(name=path.name, bytes=path.stat().st_size, sha256=digest)


def damaged(folder: Path, detail: str) -> RetrievalError:
    """Return the error for an index that does not hold what its manifest says."""
    return RetrievalError(f"index {str(folder)!r} is damaged: {detail}; {REBUILD}")
