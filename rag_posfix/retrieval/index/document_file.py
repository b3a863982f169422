"""Documents in one SQLite file: a row with a checksum per document, and facts about all; changed in transactions."""

from __future__ import annotations

import json
import os
import sqlite3
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from langchain_core.documents import Document

from rag_posfix.errors import IndexBusyError, RetrievalError
from rag_posfix.files import flush
from rag_posfix.retrieval.index.documents import IndexEntry, document_json
from rag_posfix.text import parse_json

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
