"""An index on disk: a folder with a manifest and data files, replaced atomically and checked when it is read.

``manifest.json`` names the data files with their sizes and hashes. Each save writes data files under new names and
replaces the manifest last, so the folder is one complete index at every moment. Readers neither write nor lock, and
mapped files stay as they were: an index may be on a read-only or network file system while it is replaced.

Files next to an index folder while it is written: a lock, unfinished states, and vectors that were computed.

The operating system frees the lock when its process ends, however it ends. Readers need no lock.

What an index holds: files with their passages, and fields of the metadata with the types of their values.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rag_posfix.contracts.retrieval import (
    SimilarityRange,
    comparison_key,
    comparisons,
    elements,
    field_values,
    parse_filter,
)
from rag_posfix.errors import IndexBusyError, RetrievalError, missing_extra
from rag_posfix.files import flush, replace_durably
from rag_posfix.retrieval.index.documents import IndexEntry
from rag_posfix.retrieval.index.file_formats import (
    BM25_ROLES,
    BM25Index,
    MappedDocuments,
    import_faiss,
    read_bm25_files,
    read_document_lines,
    read_offsets,
    read_vectors,
    write_bm25_files,
    write_document_lines,
    write_vectors,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_SCHEMA = """
CREATE TABLE IF NOT EXISTS model (identity TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS vectors (text BLOB PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID;
"""
_TEXTS_PER_QUERY = 500


def partial_folder(folder: Path, token: str) -> Path:
    """Return the folder next to an index in which its next state is written."""
    return folder.parent / f".{folder.name}.{token}.partial"


@contextmanager
def locked(folder: Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Be the only writer of an index while the block runs; a thread may enter again.

    Unfinished states of writers that were killed are removed first. The lock file holds the id of the writer.

    Raises:
        IndexBusyError: another thread or process is writing the index.
        RetrievalError: the lock file cannot be made.
        ConfigError: filelock is not installed.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError as error:
        raise missing_extra("filelock", "local") from error
    folder = Path(os.path.realpath(folder))
    file = folder.parent / f".{folder.name}.lock"
    lock = FileLock(file, is_singleton=True)  # the same object for a second entry of this thread
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait_seconds)
    except Timeout:
        raise IndexBusyError(
            f"the index {str(folder)!r} is being written by another process{_writer(file)}; wait until it ends, or "
            "choose another folder"
        ) from None
    except OSError as error:
        raise RetrievalError(f"cannot write the index {str(folder)!r}: {error.strerror or error}") from error
    try:
        if lock.lock_counter == 1:
            with suppress(OSError):
                file.write_text(str(os.getpid()), encoding="ascii")
            leftover = re.compile(
                rf"\.{re.escape(folder.name)}\.[0-9a-f]{{12}}\.partial"
            )  # not of NAME.2024 beside it
            for path in filter(lambda path: leftover.fullmatch(path.name), folder.parent.iterdir()):
                shutil.rmtree(path, ignore_errors=True)
        yield
    finally:
        if lock.lock_counter == 1:
            with suppress(OSError):  # Windows cannot remove an open file
                file.unlink()  # before the release: a waiter sees that its file is gone, and makes a new one
        lock.release()


def _writer(file: Path) -> str:
    try:
        number = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
    return f" (process {number})" if number.isdecimal() else ""


class EmbeddedTexts:
    """Vectors that an unfinished update has computed, by a hash of their texts. A ``put`` is durable."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, texts: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Return the stored vectors of ``texts``, all of the same dimension; texts without a vector are left out."""
        import numpy as np

        texts_by_key = {_key(text): text for text in texts}
        keys = list(texts_by_key)
        vectors: dict[str, NDArray[np.float32]] = {}
        for start in range(0, len(keys), _TEXTS_PER_QUERY):
            batch = keys[start : start + _TEXTS_PER_QUERY]
            marks = ",".join("?" * len(batch))
            for key, vector in self._connection.execute(
                f"SELECT text, vector FROM vectors WHERE text IN ({marks})", batch
            ):
                vectors[texts_by_key[key]] = np.frombuffer(vector, dtype="<f4").astype(np.float32)
        return vectors if len({len(vector) for vector in vectors.values()}) <= 1 else {}

    def put(self, texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
        """Keep the vectors of texts, one row per text."""
        rows = [(_key(text), vector.astype("<f4").tobytes()) for text, vector in zip(texts, vectors, strict=True)]
        with self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)


@contextmanager
def embedded_texts(folder: Path, identity: str) -> Iterator[EmbeddedTexts | None]:
    """Yield the vectors of an unfinished update; remove them if the block succeeds, keep them if it fails.

    A damaged file, or one of another model, is started anew. Yields None where no file can be kept, for example next
    to a folder that cannot be written. The caller holds the lock of the folder.
    """
    folder = Path(os.path.realpath(folder))
    file = folder.parent / f".{folder.name}.embedded"
    connection = _open_embedded(file, identity)
    if connection is None:
        connection = _open_embedded(file, identity)  # the first call removed it
    if connection is None:
        yield None
        return
    with closing(connection):
        yield EmbeddedTexts(connection)
    _remove_embedded(file)


def _open_embedded(file: Path, identity: str) -> sqlite3.Connection | None:
    """Return an open file of vectors of a model; None after removing it if it is damaged or of another model."""
    connection = None
    try:
        connection = sqlite3.connect(file)
        connection.executescript(_SCHEMA)
        connection.execute("SELECT count(*) FROM vectors WHERE length(vector) % 4 != 0").fetchone()
        with connection:
            connection.execute("INSERT INTO model SELECT ? WHERE NOT EXISTS (SELECT 1 FROM model)", [identity])
        if connection.execute("SELECT identity FROM model").fetchall() == [(identity,)]:
            return connection
    except sqlite3.Error:
        pass
    if connection is not None:
        connection.close()
    with suppress(OSError):
        _remove_embedded(file)
    return None


def _remove_embedded(file: Path) -> None:
    for path in (file, file.with_name(f"{file.name}-journal")):
        path.unlink(missing_ok=True)


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


T = TypeVar("T")
_FORMAT: Final = "rag-posfix-index"
_VERSION = 2
_MANIFEST = "manifest.json"
_WAIT_SECONDS = 60.0
_ATTEMPTS = 5
"""How often an index is read that is replaced while it is read."""
_DATA_FILE = re.compile(r"\w+-[0-9a-f]{12}\.(faiss|jsonl|json|npy)")
_REBUILD: Final = "build the index again with: rag-posfix index PATH... --out DIR --rebuild"


class IndexFile(BaseModel):
    """Name, size and hash of one data file of an index."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(pattern=r"^\w[\w.-]*$")
    bytes: int = Field(ge=0)
    sha256: str


class IndexManifest(BaseModel):
    """The manifest of an index.

    Attributes:
        embedding: Identity of the embedding model that the index was built with.
        dimension: Length of a vector.
        count: Number of documents.
        removed: Number of vectors in a graph whose documents were removed.
        similarity: The range of similarities that ``calibrate_index`` measured, or None.
        files: Data files by role: ``vectors``, ``documents``, ``table`` (byte offsets of the documents), and
            ``BM25_ROLES`` if there are word statistics.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["rag-posfix-index"] = _FORMAT
    version: int = _VERSION
    embedding: str
    dimension: int = Field(ge=1)
    count: int = Field(ge=0)
    removed: int = Field(default=0, ge=0)
    similarity: SimilarityRange | None = None
    files: dict[str, IndexFile]


@dataclass(frozen=True, slots=True)
class IndexContents:
    """The data of an index: word statistics have one row per document.

    ``vectors`` is a faiss index with the keys of ``entries``, which ascend, and possibly keys of removed documents.
    """

    vectors: Any
    entries: Mapping[int, IndexEntry]
    embedding: str
    bm25: BM25Index | None = None
    similarity: SimilarityRange | None = None

    def removed(self) -> set[int]:
        """Return the keys of vectors whose documents were removed."""
        import numpy as np

        stored = import_faiss().vector_to_array(self.vectors.id_map)
        keys = np.fromiter(self.entries, dtype=np.int64, count=len(self.entries))
        return set(np.setdiff1d(stored, keys, assume_unique=True).tolist())


def write_index(folder: Path, contents: IndexContents) -> IndexManifest:
    """Write an index into a new or empty folder, or in place of an existing index, atomically.

    Raises:
        RetrievalError: the folder holds something else, metadata cannot be written as JSON, or writing failed.
    """
    folder = Path(os.path.realpath(folder))
    check_writable(folder)
    token = uuid.uuid4().hex[:12]
    with locked(folder, wait_seconds=_WAIT_SECONDS):
        staging = partial_folder(folder, token)
        try:
            staging.mkdir(parents=True)
            manifest = _stage(staging, contents, token)
            _publish(staging, folder)
        except OSError as error:
            raise RetrievalError(f"cannot write the index {str(folder)!r}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return manifest


def write_similarity(folder: Path, similarity: SimilarityRange) -> None:
    """Write a range of similarities into the manifest of an index; its data files stay.

    Raises:
        RetrievalError: there is no index, or it cannot be written.
    """
    folder = Path(os.path.realpath(folder))
    with locked(folder, wait_seconds=_WAIT_SECONDS):
        manifest = read_manifest(folder).model_copy(update={"similarity": similarity})
        try:
            replace_durably(folder / _MANIFEST, f"{manifest.model_dump_json(indent=2)}\n".encode())
        except OSError as error:
            raise RetrievalError(f"cannot write the index {str(folder)!r}: {error.strerror or error}") from error


def holds_index(folder: Path) -> bool:
    """Return whether a folder has the manifest of an index."""
    try:
        read_manifest(folder)
    except RetrievalError:
        return False
    return True


def read_manifest(folder: Path) -> IndexManifest:
    """Return the manifest of the index in ``folder``.

    Raises:
        RetrievalError: it is missing, damaged, or of another program or version.
    """
    try:
        text = (folder / _MANIFEST).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if not folder.exists():
            raise RetrievalError(
                f"there is no folder {str(folder)!r}; check its name, or make an index with: rag-posfix index PATH... "
                "--out DIR"
            ) from None
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


def check_sizes(folder: Path) -> IndexManifest:
    """Return the manifest of an index after checking that its files are there in full size, without reading them."""
    manifest = read_manifest(folder)
    for role in manifest.files:
        _checked_file(folder, manifest, role, False)
    return manifest


def read_one_version(folder: Path, load: Callable[[], T]) -> tuple[T, IndexManifest]:
    """Return what ``load`` reads from an index, all of one version, and its manifest.

    The files of a version are deleted when the next is published, and each part reads the manifest for itself: vectors
    and words of two versions do not fit together.

    Raises:
        RetrievalError: as ``load`` raises it, or the index is replaced too often.
    """
    for _ in range(_ATTEMPTS):
        manifest = read_manifest(folder)
        try:
            read = load()
        except RetrievalError:
            if read_manifest(folder) == manifest:
                raise
            continue
        if read_manifest(folder) == manifest:
            return read, manifest
    raise RetrievalError(
        f"index {str(folder)!r} was replaced {_ATTEMPTS} times while it was read; replace it less often"
    )


def read_index(folder: Path, embedding: str, *, mmap: bool = False, verify: bool = True) -> IndexContents:
    """Read vectors and documents after checking that they are complete and were built with the model ``embedding``.

    Args:
        mmap: Memory-map vectors and documents instead of reading them; the entries are then no dict.
        verify: Compare the hashes of all files, not only their sizes.

    Raises:
        RetrievalError: it is missing, damaged, of another program or version, or of another embedding model.
    """
    manifest = read_manifest(folder)
    if manifest.embedding != embedding:
        raise RetrievalError(
            f"index {str(folder)!r} was built with embedding model {manifest.embedding!r}, not {embedding!r}; "
            f"use that model, or {_REBUILD}"
        )
    for role in manifest.files:  # also those that are not read here: a damaged index is not used at all
        _checked_file(folder, manifest, role, verify)
    path = _checked_file(folder, manifest, "vectors", False)
    entries = _read_documents(folder, manifest, mmap, False)
    with _reported_as_damage(folder):
        # Vectors are mapped only with the documents: faiss aborts the process if mapped vectors are added to.
        vectors = read_vectors(path, mapped=mmap and not isinstance(entries, dict))
    contents = IndexContents(vectors, entries, manifest.embedding, similarity=manifest.similarity)
    count, removed = len(entries), contents.removed()
    if manifest.count != count or manifest.dimension != vectors.d or manifest.removed + count != vectors.ntotal:
        raise _damaged(
            folder,
            f"it holds {vectors.ntotal} vectors of dimension {vectors.d} and {count} documents, the manifest says "
            f"{manifest.count + manifest.removed} of dimension {manifest.dimension} and {manifest.count}",
        )
    if len(removed) != manifest.removed:
        raise _damaged(folder, "its vectors and its documents have different keys")
    return contents


def read_entries(folder: Path, *, mmap: bool = False, verify: bool = True) -> Mapping[int, IndexEntry]:
    """Read the documents only, as ``read_index``; this needs no embedding model."""
    manifest = read_manifest(folder)
    entries = _read_documents(folder, manifest, mmap, verify)
    if len(entries) != manifest.count:
        raise _damaged(folder, f"it holds {len(entries)} documents, the manifest says {manifest.count}")
    return entries


def read_bm25(folder: Path, *, mmap: bool = False, verify: bool = True) -> tuple[NDArray[np.int64], BM25Index] | None:
    """Read the word statistics and the keys of their documents, as ``read_index``; None if the index has none."""
    manifest = read_manifest(folder)
    if not any(role in manifest.files for role in BM25_ROLES):
        return None
    paths = {role: _checked_file(folder, manifest, role, verify) for role in BM25_ROLES}
    offsets = _checked_file(folder, manifest, "table", verify)
    with _reported_as_damage(folder):
        keys, index = read_offsets(offsets)[:, 0], read_bm25_files(paths, mapped=mmap)
    if not len(keys) == len(index) == manifest.count:
        raise _damaged(folder, f"its word statistics are of {len(index)} documents, it holds {manifest.count}")
    return keys, index


def check_writable(folder: Path) -> None:
    """Raise RetrievalError if ``folder`` is a file, or a folder with other content than an index."""
    try:
        # An interrupted save into an empty folder leaves data files without a manifest.
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
    write_document_lines(contents.entries, paths["documents"], paths["table"])
    if contents.bm25 is not None:
        statistics = {role: staging / f"{role}-{token}.npy" for role in BM25_ROLES}
        statistics["bm25_words"] = staging / f"bm25_words-{token}.json"
        write_bm25_files(contents.bm25, statistics)
        paths |= statistics
    manifest = IndexManifest(
        embedding=contents.embedding,
        dimension=contents.vectors.d,
        count=len(contents.entries),
        removed=contents.vectors.ntotal - len(contents.entries),
        similarity=contents.similarity,
        files={role: describe_file(path) for role, path in paths.items()},
    )
    (staging / _MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for path in (*paths.values(), staging / _MANIFEST, staging):
        flush(path)
    return manifest


def _publish(staging: Path, folder: Path) -> None:
    if not folder.exists():
        staging.replace(folder)
        flush(folder.parent)
        return
    before = _live_files(folder)
    manifest = staging / _MANIFEST
    data = [path for path in staging.iterdir() if path != manifest]
    try:
        # The manifest is replaced last: before, the folder is the old index; afterwards, the new one.
        for path in data:
            path.replace(folder / path.name)
        flush(folder)
        manifest.replace(folder / _MANIFEST)
        flush(folder)
    finally:
        # Delete the old or the new data files, whichever the manifest does not name. Any other file may belong to a
        # concurrent save.
        for name in (before | {path.name for path in data}) - _live_files(folder):
            (folder / name).unlink(missing_ok=True)


def _live_files(folder: Path) -> set[str]:
    if not (folder / _MANIFEST).exists():
        return set()
    return {file.name for file in read_manifest(folder).files.values()}


def describe_file(path: Path) -> IndexFile:
    """Return name, size and hash of a file."""
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return IndexFile(name=path.name, bytes=path.stat().st_size, sha256=digest)


def _checked_file(folder: Path, manifest: IndexManifest, role: str, verify: bool) -> Path:
    expected = manifest.files.get(role)
    if expected is None:
        raise _damaged(folder, f"the manifest names no {role} file")
    path = folder / expected.name
    try:
        size = path.stat().st_size
        changed = verify and size == expected.bytes and describe_file(path) != expected
    except FileNotFoundError:
        raise _damaged(folder, f"{expected.name} is missing") from None
    except OSError as error:
        raise RetrievalError(f"cannot read {expected.name} of {str(folder)!r}: {error.strerror or error}") from error
    if size != expected.bytes:
        raise _damaged(folder, f"{expected.name} has {size} bytes, expected {expected.bytes}")
    if changed:
        raise _damaged(folder, f"{expected.name} has changed (its sha256 does not match the manifest)")
    return path


def _read_documents(folder: Path, manifest: IndexManifest, mapped: bool, verify: bool) -> Mapping[int, IndexEntry]:
    path = _checked_file(folder, manifest, "documents", verify)
    with _reported_as_damage(folder):
        if mapped:
            return MappedDocuments(path, read_offsets(_checked_file(folder, manifest, "table", verify)))
        return read_document_lines(path)


@contextmanager
def _reported_as_damage(folder: Path) -> Iterator[None]:
    """Turn the errors of ``file_formats`` into errors that name the index."""
    try:
        yield
    except ValueError as error:
        raise _damaged(folder, str(error)) from error
    except OSError as error:
        raise RetrievalError(f"cannot read the index {str(folder)!r}: {error.strerror or error}") from error


def _damaged(folder: Path, detail: str) -> RetrievalError:
    """Return the error for an index that contradicts its manifest."""
    return RetrievalError(f"index {str(folder)!r} is damaged: {detail}; {_REBUILD}")


EXAMPLES = 5
"""Values of a field that its summary has."""

_COUNTED_VALUES = 10_000
"""Different values of a field that are counted: the memory of a summary is bounded."""


@dataclass(frozen=True, slots=True)
class FieldSummary:
    """A field of the metadata, ``a.b`` for the field ``b`` of a dict ``a``.

    Attributes:
        passages: How many passages have a value in it.
        types: How many values of each type: text, number, boolean, other.
        distinct: How many different values, at most 10,000.
        examples: The first different values.
    """

    name: str
    passages: int
    types: Mapping[str, int]
    distinct: int
    examples: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class IndexSummary:
    """An index in numbers. ``files`` has the passages of each file, "" those that were read from no file."""

    embedding: str
    dimension: int
    passages: int
    files: Mapping[str, int]
    fields: tuple[FieldSummary, ...]


def summarize_index(folder: Path) -> IndexSummary:
    """Return what an index holds; no embedding model is loaded.

    Raises:
        RetrievalError: the folder has no index, or it is damaged.
    """
    manifest = read_manifest(folder)
    files: Counter[str] = Counter()
    fields: dict[str, _FieldCounts] = {}
    for entry in read_entries(folder, mmap=True).values():
        files.update(entry.files or ("",))
        for name in _field_names(entry.document.metadata):
            fields.setdefault(name, _FieldCounts()).add(field_values(entry.document.metadata, name))
    return IndexSummary(
        manifest.embedding,
        manifest.dimension,
        manifest.count,
        dict(sorted(files.items())),
        tuple(counts.summary(name) for name, counts in sorted(fields.items())),
    )


def unknown_fields(entries: Iterable[IndexEntry], metadata_filter: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the fields of a filter that no document has, and all fields that the documents have."""
    wanted = sorted({comparison.field for comparison in comparisons(parse_filter(metadata_filter))})
    known = {name for entry in entries for name in _field_names(entry.document.metadata)}
    return [name for name in wanted if name not in known], sorted(known)


class _FieldCounts:
    def __init__(self) -> None:
        self._passages = 0
        self._types: Counter[str] = Counter()
        self._values: dict[object, Any] = {}

    def add(self, values: Iterable[Any]) -> None:
        """Count the values of one passage."""
        present = [item for value in values for item in elements(value) if item is not None]
        self._passages += bool(present)
        for item in present:
            self._types[_type_name(item)] += 1
            if len(self._values) < _COUNTED_VALUES and not isinstance(item, Mapping):
                self._values.setdefault(comparison_key(item), item)

    def summary(self, name: str) -> FieldSummary:
        examples = tuple(list(self._values.values())[:EXAMPLES])
        return FieldSummary(name, self._passages, dict(self._types), len(self._values), examples)


def _type_name(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "text"
        case _:
            return "other"


def _field_names(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names that a filter may give the fields of a document, each once."""
    names: dict[str, None] = {}
    for name, value in metadata.items():
        if isinstance(name, str):
            names |= dict.fromkeys(_nested_names(name, value))
    yield from names


def _nested_names(name: str, value: object) -> Iterator[str]:
    holders = [item for item in elements(value) if isinstance(item, Mapping)]
    if not holders:
        yield name
    for holder in holders:
        for inner, inner_value in holder.items():
            yield from _nested_names(f"{name}.{inner}", inner_value)
