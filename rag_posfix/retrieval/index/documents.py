"""The documents of an index, under integer keys and string ids, and filters by their metadata.

Vectors and word statistics refer to documents by integer key.

Documents in one SQLite file: a row with a checksum per document, and facts about all; changed in transactions.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import sqlite3
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from langchain_core.documents import Document

from rag_posfix.checked import checked_list
from rag_posfix.contracts.retrieval import (
    AllOf,
    AnyOf,
    Condition,
    Exists,
    InRange,
    Negation,
    OneOf,
    combine_filters,
    comparison_key,
    elements,
    field_values,
    has_value,
    in_range,
    matches,
    parse_filter,
    plain_scalar,
)
from rag_posfix.errors import ConfigError, IndexBusyError, RetrievalError
from rag_posfix.files import flush
from rag_posfix.parameters import shown
from rag_posfix.text import clean_json, clean_text, content_hash, parse_json, titled_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


MetadataFilter: TypeAlias = Mapping[str, Any] | Callable[[Mapping[str, Any]], bool]
"""A filter in the language of ``contracts.filters``, or a function of the metadata."""

_EXISTING = ("exists", None)
"""What the documents with a value in a field are posted under, next to the values; no value has this key."""


def check_filter(metadata_filter: object) -> None:
    """Raise ConfigError for a filter that is neither a function nor one of ``contracts.filters``."""
    if not callable(metadata_filter):
        parse_filter(metadata_filter)


def both_filters(first: MetadataFilter | None, second: MetadataFilter | None) -> MetadataFilter | None:
    """Return the filter of the documents that match two filters; None for none of them."""
    if first is None or second is None:
        return second if first is None else first
    if not callable(first) and not callable(second):
        return combine_filters(first, second)
    predicates = [filter_predicate(filter_) for filter_ in (first, second)]
    return lambda metadata: all(predicate(metadata) for predicate in predicates)


def filter_predicate(metadata_filter: MetadataFilter) -> Callable[[Mapping[str, Any]], bool]:
    """Return a filter as a function of the metadata of one document."""
    return metadata_filter if callable(metadata_filter) else partial(matches, parse_filter(metadata_filter))


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A document with an id, and the paths of the files that it was read from, as they were passed for indexing."""

    document: Document
    files: tuple[str, ...] = ()


def stored_id(document: Document) -> str:
    """Return the id that a document is stored under: its own, or a hash of its text and metadata."""
    if document.id:
        return clean_text(str(document.id))
    metadata = sorted((str(key), repr(value)) for key, value in document.metadata.items())
    return content_hash(document.page_content, *(item for pair in metadata for item in pair))


def stored_copy(document: Document, document_id: str | None = None) -> Document:
    """Return the copy of a document that a store keeps: with clean text and metadata of JSON's types, and an id.

    Numbers, booleans and texts of numpy become those of Python, tuples become lists.

    Raises:
        RetrievalError: metadata of other types, or numbers that are not finite.
    """
    content = clean_json(document.page_content)
    try:
        metadata = clean_json(_json_value(document.metadata))
    except (TypeError, RecursionError) as error:
        raise _unfit_metadata(document_id or document.id, error) from error
    named = Document(id=document_id or document.id, page_content=content, metadata=metadata)
    return named.model_copy(update={"id": stored_id(named)})


def _json_value(value: Any) -> Any:
    """Return a value of metadata in JSON's types; TypeError for what has none."""
    value = plain_scalar(value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise TypeError(f"a {type(value).__name__}: {shown(value)}")


def checked_documents(documents: Iterable[Document]) -> list[Document]:
    """Return documents as a list, or raise ConfigError for anything else."""
    return checked_list("documents", documents, Document, "langchain_core Documents: Document(page_content=text)")


def document_json(document: Document, fields: Mapping[str, Any]) -> str:
    """Return fields of a document as JSON; RetrievalError if its metadata cannot be written so."""
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _unfit_metadata(document.id, error) from error


def _unfit_metadata(document_id: str | None, error: Exception) -> RetrievalError:
    return RetrievalError(
        f"document {document_id!r} has metadata that JSON cannot hold ({error}); "
        "keep to strings, finite numbers, booleans, None, lists and dictionaries"
    )


def deep_copy(document: Document) -> Document:
    """Return a copy that shares no mutable object with ``document``."""
    return Document(id=document.id, page_content=document.page_content, metadata=copy.deepcopy(document.metadata))


def searchable_text(document: Document) -> str:
    """Return the text of a document that is embedded and whose words are counted: its title and its text."""
    return titled_text(document.metadata.get("title"), document.page_content)


class DocumentTable:
    """Documents by key and by id. Keys ascend with every document that is added and are never used again.

    Returned documents are not copies. Methods may be called from any thread.

    Args:
        entries: The initial content, by ascending key. An immutable mapping, such as documents that stay in a
            memory-mapped file, makes a table whose methods of change raise ConfigError.
    """

    def __init__(self, entries: Mapping[int, IndexEntry] | None = None) -> None:
        self.entries: Mapping[int, IndexEntry] = {} if entries is None else entries
        """By key, ascending. Not to be iterated while another thread changes the table, nor to be changed."""
        self.revision = 0
        """Changes with every change of the table."""
        self.next_key = 1 + max(self.entries, default=-1)
        self._keys: dict[str, int] | None = None
        # For each field, the keys of the documents with each value (by comparison key); built on first use of a field.
        self._postings: dict[str, dict[tuple[str, object], NDArray[np.int64]]] = {}
        self._fields: set[str] | None = None  # of all documents, from the first pass over them: filters name any field
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self.entries)

    def document(self, key: int) -> Document | None:
        """Return the document under ``key``, or None if there is none any more."""
        entry = self.entries.get(key)
        return None if entry is None else entry.document

    def key_of(self, document_id: str) -> int | None:
        """Return the key of the document with this id, or None."""
        return self._key_by_id().get(document_id)

    def entry_of(self, document_id: str) -> IndexEntry | None:
        """Return the entry with this id, or None."""
        key = self.key_of(document_id)
        return None if key is None else self.entries.get(key)

    def ids(self) -> list[str]:
        """Return all ids, in the order in which the documents were added."""
        return list(self._key_by_id())

    def first(self, count: int) -> list[Document]:
        """Return up to ``count`` documents, in the order in which they were added."""
        with self._lock:
            return [entry.document for entry in itertools.islice(self.entries.values(), count)]

    def snapshot(self) -> tuple[int, list[int], list[str]]:
        """Return the revision, the keys, and the searchable texts in the order of the keys."""
        with self._lock:
            texts = [searchable_text(entry.document) for entry in self.entries.values()]
            return self.revision, list(self.entries), texts

    def add(self, entries: Iterable[IndexEntry]) -> list[int]:
        """Add documents whose ids are not in the table, and return their keys."""
        with self._lock:
            stored, keys_by_id = self.mutable_entries(), self._key_by_id()
            first = self.next_key
            for entry in entries:
                stored[self.next_key] = entry
                keys_by_id[str(entry.document.id)] = self.next_key
                self.next_key += 1
            self._mark_changed()
            return list(range(first, self.next_key))

    def replace(self, entries: Iterable[IndexEntry]) -> None:
        """Replace the entries with the same ids; their keys stay."""
        with self._lock:
            stored, keys_by_id = self.mutable_entries(), self._key_by_id()
            for entry in entries:
                stored[keys_by_id[str(entry.document.id)]] = entry
            self._mark_changed()

    def remove(self, ids: Sequence[str]) -> tuple[list[int], list[Document]]:
        """Remove documents that are in the table; return their keys and the documents."""
        with self._lock:
            stored, keys_by_id = self.mutable_entries(), self._key_by_id()
            keys = [keys_by_id.pop(document_id) for document_id in ids]
            removed = [stored.pop(key).document for key in keys]
            self._mark_changed()
            return keys, removed

    def matching(self, metadata_filter: MetadataFilter) -> NDArray[np.int64]:
        """Return the keys of the documents that match a filter, ascending.

        Cost: with a dict, one pass over the documents when one of their fields is first used, and set operations on
        keys afterwards; with a function, one call per document each time.
        """
        import numpy as np

        with self._lock:
            if callable(metadata_filter):
                predicate = metadata_filter
                keys = [k for k, e in self.entries.items() if predicate(MappingProxyType(e.document.metadata))]
                return np.asarray(keys, dtype=np.int64)
            return self._meeting(parse_filter(metadata_filter))

    def _meeting(self, condition: Condition) -> NDArray[np.int64]:
        """Return the keys of the documents that meet a condition, ascending."""
        import numpy as np

        match condition:
            case AllOf(()):
                return np.fromiter(self.entries, dtype=np.int64)
            case AllOf(conditions):
                columns = [self._meeting(member) for member in conditions]
                return reduce(lambda a, b: np.intersect1d(a, b, assume_unique=True), columns)
            case AnyOf(conditions):
                return _union([self._meeting(member) for member in conditions])
            case Negation(negated):
                everything = np.fromiter(self.entries, dtype=np.int64)
                return np.setdiff1d(everything, self._meeting(negated), assume_unique=True)
            case Exists(field):
                return self._postings_of(field).get(_EXISTING, np.empty(0, dtype=np.int64))
            case OneOf(field, values):
                postings = self._postings_of(field)
                return _union([postings[key] for key in map(comparison_key, values) if key in postings])
            case InRange(field):
                postings = self._postings_of(field)
                return _union([rows for key, rows in postings.items() if in_range(condition, key[1])])

    def _postings_of(self, field: str) -> dict[tuple[str, object], NDArray[np.int64]]:
        """Return the keys of the documents by each value of a field, and under ``_EXISTING`` those that have one."""
        import numpy as np

        if field not in self._postings and (self._fields is None or _is_known(field, self._fields)):
            keys: dict[tuple[str, object], list[int]] = {}
            fields: set[str] = set()
            for key, entry in self.entries.items():
                metadata = entry.document.metadata
                fields.update(metadata)
                values = list(field_values(metadata, field))
                names = {comparison_key(item) for value in values for item in elements(value)}
                for name in names | {_EXISTING} if any(map(has_value, values)) else names:
                    keys.setdefault(name, []).append(key)
            self._fields = fields
            if _is_known(field, fields):
                self._postings[field] = {name: np.asarray(rows, dtype=np.int64) for name, rows in keys.items()}
        return self._postings.get(field, {})

    def _key_by_id(self) -> dict[str, int]:
        """Return keys by id; for memory-mapped documents, the first call reads all of them."""
        with self._lock:
            if self._keys is None:
                self._keys = {str(entry.document.id): key for key, entry in self.entries.items()}
            return self._keys

    def mutable_entries(self) -> dict[int, IndexEntry]:
        """Return the entries, or raise ConfigError if they are memory-mapped and cannot be changed."""
        if not isinstance(self.entries, dict):
            raise ConfigError(
                "this index was loaded with mmap=True and cannot be changed; load it without to add or delete"
            )
        return self.entries

    def _mark_changed(self) -> None:
        self.revision += 1
        self._postings.clear()
        self._fields = None


def _is_known(field: str, fields: Set[str]) -> bool:
    """Return whether one of the fields can have the value of ``field``: that field, or ``a`` for ``a.b``."""
    return field in fields or any(field[:dot] in fields for dot, mark in enumerate(field) if mark == ".")


def _union(columns: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the keys that are in any of ``columns``, ascending."""
    import numpy as np

    if len(columns) == 1:
        return columns[0]
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *columns]))


StoredRow: TypeAlias = tuple[int, IndexEntry, bytes | None]
"""Key, document and vector (float32, little endian; None if the vectors are in a file of their own)."""

_SCHEMA = """
BEGIN;
CREATE TABLE facts (value TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE documents (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, text TEXT NOT NULL, metadata TEXT NOT NULL, files TEXT NOT NULL,
    vector BLOB, checksum INTEGER NOT NULL
);
CREATE TABLE scratch (value BLOB); INSERT INTO scratch VALUES (zeroblob(98000));
COMMIT;
"""
# The journal gets the size of the pages that a transaction changes: 24 are twice what deleting a document changes.
_ALLOCATE_JOURNAL = "BEGIN; UPDATE scratch SET value = randomblob(98000); DROP TABLE scratch; COMMIT;"
# A rollback journal and no write-ahead log: a damaged page of a log would silently undo every commit after it, readers
# would have to write, and network file systems could not be used. With EXTRA a commit is on the disk when it returns.
# The journal is kept, so that a document can be deleted on a full disk: the pages that this changes fit into it.
# A service keeps many files open, so their page caches are small (KiB).
_SETTINGS = """
PRAGMA journal_mode = PERSIST; PRAGMA journal_size_limit = 131072; PRAGMA synchronous = EXTRA;
PRAGMA cache_size = -256; PRAGMA cell_size_check = ON; PRAGMA trusted_schema = OFF;
"""
_CANNOT_WRITE: Final = frozenset(
    {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY}
)


class DocumentFile:
    """A file of documents. One object may be used by several threads, one at a time.

    Readers see the state of the last commit; they wait while another process commits, but not for its transaction.
    Methods raise RetrievalError if the file is damaged, OSError if it cannot be opened, read or written, and
    IndexBusyError if another process did not end in time (``wait_seconds``).
    """

    def __init__(self, path: Path, *, wait_seconds: float = 30.0) -> None:
        # Nobody may open the file in another way: closing any descriptor of it frees this process's locks (POSIX).
        self.path = path
        with self._translated():
            self._connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=rw",
                uri=True, timeout=wait_seconds, isolation_level=None, check_same_thread=False,
            )  # fmt: skip
            self.close = weakref.finalize(self, self._connection.close)
            self.close.atexit = False  # a forked process must not close what its parent uses
            self._connection.executescript(_SETTINGS)

    @classmethod
    def create(cls, path: Path, facts: Mapping[str, Any], rows: Iterable[StoredRow] = ()) -> None:
        """Make a file, which is there as a whole or not at all; the caller is the only writer of the folder."""
        scratch = path.with_name(f".{path.name}.partial")
        try:
            scratch.unlink(missing_ok=True)
            os.close(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            file = cls(scratch)
            with file._translated():
                file._connection.executescript(_SCHEMA)
                with file.transaction():
                    file.insert(rows)
                    file._connection.execute("INSERT INTO facts VALUES ('', 0)")
                    file.set_facts(facts)
            file.close()
            scratch.replace(path)
            flush(path.parent)
            with suppress(OSError, IndexBusyError):  # only deleting on a full disk needs it
                file = cls(path)
                with file._translated():
                    file._connection.executescript(_ALLOCATE_JOURNAL)
                file.close()
        finally:
            for leftover in path.parent.glob(".*.partial*"):  # also files of killed writers
                leftover.unlink(missing_ok=True)

    @contextmanager
    def transaction(self, *, erase: bool = True) -> Iterator[None]:
        """Be the only writer; the changes of the block are made as one, or not at all if it raises.

        Without ``erase`` a removed text may stay in free pages of the file, and needs no room in the journal.
        """
        with self._translated():
            if not erase:
                self._connection.execute("PRAGMA secure_delete = FAST")
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """See one state of the file in all reads of the block; no writer can commit meanwhile."""
        with self._translated():
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")

    def insert(self, rows: Iterable[StoredRow]) -> None:
        """Add documents under new keys and new ids, in a transaction.

        Raises:
            RetrievalError: the metadata of a document cannot be written as JSON.
        """
        for key, entry, vector in rows:
            document = entry.document
            metadata, files = document_json(document, document.metadata), json.dumps(entry.files)
            columns = (key, str(document.id), document.page_content, metadata, files)
            self._connection.execute(
                "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)", (*columns, vector, _checksum(*columns, vector))
            )

    def remove(self, ids: Iterable[str]) -> None:
        """Remove documents, in a transaction; an unknown id is no error."""
        self._connection.executemany("DELETE FROM documents WHERE id = ?", ((name,) for name in ids))

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        """Replace the facts, in a transaction."""
        value = json.dumps(dict(facts))
        self._connection.execute("UPDATE facts SET value = ?, checksum = ?", (value, zlib.crc32(value.encode())))

    def facts(self) -> dict[str, Any]:
        """Return the facts about all documents."""
        with self._translated():
            for value, checksum in self._connection.execute("SELECT value, checksum FROM facts").fetchall():
                if zlib.crc32(str(value).encode()) == checksum:
                    return dict(json.loads(value))
        raise self._damaged("its facts are missing or have another checksum")

    def rows(self, after: int = -1) -> Iterator[StoredRow]:
        """Yield the rows with keys above ``after``, by key."""
        with self._translated():
            for row in self._connection.execute("SELECT * FROM documents WHERE key > ? ORDER BY key", (after,)):
                yield self._parsed(row)

    def ids(self) -> list[str]:
        """Return all ids."""
        with self._translated():
            return [name for (name,) in self._connection.execute("SELECT id FROM documents")]

    def data_version(self) -> int:
        """Return a number that changes with each commit of another connection."""
        with self._translated():
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def _parsed(self, row: tuple[Any, ...]) -> StoredRow:
        *columns, checksum = row
        try:
            key, name, text, metadata, files, vector = columns
            if _checksum(*columns) != checksum:
                raise ValueError("checksum")
            document = Document(id=name, page_content=text, metadata=parse_json(metadata))
            return key, IndexEntry(document, tuple(json.loads(files))), vector
        except (ValueError, TypeError) as error:
            raise self._damaged(f"the row of document {str(row[1])[:100]!r} has another checksum") from error

    def _damaged(self, detail: str) -> RetrievalError:
        return RetrievalError(f"{str(self.path)!r} is damaged: {detail}")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors of SQLite into errors of this package."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise IndexBusyError(f"{str(self.path)!r} is being written by another process; try again") from error
            if code in _CANNOT_WRITE:
                self.path.stat()  # FileNotFoundError: it was deleted; exists() would hide other errors
                raise OSError(str(error)) from error
            raise self._damaged(str(error).splitlines()[0].partition(" with text ")[0]) from error  # of a document


def _checksum(key: int, name: str, text: str, metadata: str, files: str, vector: bytes | None) -> int:
    return zlib.crc32(vector or b"", zlib.crc32("\0".join((str(key), name, text, metadata, files)).encode()))
