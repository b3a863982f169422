"""An index as a folder: ``manifest.json``, the vectors as faiss writes them, the documents as JSON lines.

The manifest names the other two files and their hashes, and is the last to be put in place. Each save writes new
file names, so that a folder is one complete index at every moment, whenever the process is stopped. Knows nothing
of embedding models or searching; nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.records import dump_record, parse_json

__all__ = ["IndexContents", "IndexManifest", "check_writable", "read_index", "read_manifest", "write_index"]

_FORMAT: Final = "rag-posfix-index"
_VERSION = 1
_MANIFEST = "manifest.json"
_DATA_FILE = re.compile(r"(vectors|documents)-[0-9a-f]{12}\.(faiss|jsonl)")
_REBUILD = "build the index again with: rag-posfix index PATH... --out DIR"


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
        files: ``vectors`` and ``documents``.
    """

    format: Literal["rag-posfix-index"] = _FORMAT
    version: int = _VERSION
    embedding: str
    dimension: int = Field(ge=1)
    count: int = Field(ge=0)
    files: dict[str, IndexFile]


@dataclass(frozen=True, slots=True)
class IndexContents:
    """What is kept of an index.

    Attributes:
        vectors: A faiss index whose keys are those of ``documents``.
        documents: Documents by key.
        embedding: Identity of the embedding model.
    """

    vectors: Any
    documents: dict[int, Document]
    embedding: str


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


def read_index(folder: Path, embedding: str) -> IndexContents:
    """Read an index after checking that it is whole and was built with the model ``embedding``.

    Raises:
        RetrievalError: it is missing, damaged, of another program or version, or of another embedding model.
    """
    manifest = read_manifest(folder)
    if manifest.embedding != embedding:
        raise RetrievalError(
            f"index {str(folder)!r} was built with embedding model {manifest.embedding!r}, not {embedding!r}; "
            f"use that model, or {_REBUILD}"
        )
    for role in ("vectors", "documents"):
        _check_file(folder, manifest.files.get(role), role)
    vectors = _read_vectors(folder / manifest.files["vectors"].name)
    documents = _read_documents(folder / manifest.files["documents"].name)
    if not manifest.count == vectors.ntotal == len(documents) or manifest.dimension != vectors.d:
        raise _damaged(
            folder,
            f"it holds {vectors.ntotal} vectors of dimension {vectors.d} and {len(documents)} documents, "
            f"the manifest says {manifest.count} of dimension {manifest.dimension}",
        )
    if _keys(vectors) != set(documents):
        raise _damaged(folder, "its vectors and its documents have different keys")
    return IndexContents(vectors, documents, manifest.embedding)


def read_manifest(folder: Path) -> IndexManifest:
    """Return the manifest of the index in ``folder``.

    Raises:
        RetrievalError: there is none, or it is not one of ours.
    """
    try:
        text = (folder / _MANIFEST).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise RetrievalError(f"no index in {str(folder)!r} ({_MANIFEST} is missing); {_REBUILD}") from None
    except UnicodeDecodeError:
        raise _damaged(folder, f"{_MANIFEST} is not text") from None
    except OSError as error:
        raise RetrievalError(f"cannot read the index {str(folder)!r}: {error.strerror or error}") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise _damaged(folder, f"{_MANIFEST} is not JSON") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise RetrievalError(f"{str(folder)!r} is not an index of rag-posfix; give the folder of one, or {_REBUILD}")
    if data.get("version") != _VERSION:
        raise RetrievalError(
            f"index {str(folder)!r} has format version {data.get('version')!r}, this release reads {_VERSION}; "
            f"install the release that wrote it, or {_REBUILD}"
        )
    try:
        return IndexManifest.model_validate(data)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, item["loc"])) for item in error.errors())
        raise _damaged(folder, f"{_MANIFEST} has missing or wrong fields: {fields}") from None


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
    import faiss

    vectors, documents = staging / f"vectors-{token}.faiss", staging / f"documents-{token}.jsonl"
    try:
        faiss.write_index(contents.vectors, str(vectors))
    except RuntimeError as error:
        raise OSError(f"faiss could not write the vectors: {str(error).splitlines()[0]}") from error
    with documents.open("w", encoding="utf-8", newline="\n") as handle:
        for key, document in contents.documents.items():
            record = {"key": key, "id": document.id, "text": document.page_content, "metadata": document.metadata}
            handle.write(dump_record(record) + "\n")
    manifest = IndexManifest(
        embedding=contents.embedding,
        dimension=contents.vectors.d,
        count=contents.vectors.ntotal,
        files={"vectors": _describe(vectors), "documents": _describe(documents)},
    )
    (staging / _MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for path in (vectors, documents, staging / _MANIFEST, staging):
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


def _describe(path: Path) -> IndexFile:
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return IndexFile(name=path.name, bytes=path.stat().st_size, sha256=digest)


def _check_file(folder: Path, expected: IndexFile | None, role: str) -> None:
    if expected is None:
        raise _damaged(folder, f"{_MANIFEST} names no {role} file")
    try:
        found = _describe(folder / expected.name)
    except FileNotFoundError:
        raise _damaged(folder, f"{expected.name} is missing") from None
    except OSError as error:
        raise RetrievalError(f"cannot read {expected.name} of {str(folder)!r}: {error.strerror or error}") from error
    if found.bytes != expected.bytes:
        raise _damaged(folder, f"{expected.name} has {found.bytes} bytes, expected {expected.bytes}")
    if found.sha256 != expected.sha256:
        raise _damaged(folder, f"{expected.name} has changed (its sha256 does not match the manifest)")


def _read_vectors(path: Path) -> Any:
    import faiss

    try:
        vectors = faiss.read_index(str(path))
    except RuntimeError as error:
        raise _damaged(path.parent, f"faiss cannot read {path.name}") from error
    if not isinstance(vectors, faiss.IndexIDMap2):
        raise _damaged(path.parent, f"{path.name} holds a {type(vectors).__name__}, expected an IndexIDMap2")
    return vectors


def _keys(vectors: Any) -> set[int]:
    import faiss

    return set(faiss.vector_to_array(vectors.id_map).tolist())


def _read_documents(path: Path) -> dict[int, Document]:
    try:
        with path.open(encoding="utf-8", newline="\n") as handle:
            return dict(_parse_document(line) for line in handle)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path.parent, f"{path.name} holds a line that is not a document") from error


def _parse_document(line: str) -> tuple[int, Document]:
    record = parse_json(line)
    return record["key"], Document(id=record["id"], page_content=record["text"], metadata=record["metadata"])


def _damaged(folder: Path, detail: str) -> RetrievalError:
    return RetrievalError(f"index {str(folder)!r} is damaged: {detail}; {_REBUILD}")
