"""An SQLite file of tagged entries that several processes share. A damaged file is replaced by an empty one.

The write-ahead log (WAL) needs memory shared between the processes: the file must be on a local disk, not on a network
file system.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two processes that replace a damaged file at the same time may do so twice
    fcntl = None  # type: ignore[assignment]

# The value of an entry is in its row, or in a file of its own that ``files`` names; its value is then empty.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, expires_at REAL NOT NULL, used_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS tags (
    tag TEXT NOT NULL, key TEXT NOT NULL REFERENCES entries (key) ON DELETE CASCADE, PRIMARY KEY (tag, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (
    key TEXT PRIMARY KEY REFERENCES entries (key) ON DELETE CASCADE, name TEXT NOT NULL, n_bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_by_use ON entries (used_at);
CREATE INDEX IF NOT EXISTS entries_by_expiry ON entries (expires_at);
CREATE INDEX IF NOT EXISTS tags_by_key ON tags (key);
"""
_N_TABLES = 3
_WAL_BYTES = 4 * 1024**2


def is_damage(error: BaseException) -> bool:
    """Return whether ``error`` means that the file is damaged, is no database, or has lost its tables."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return False
    return (code & 0xFF) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR} or (
        code == sqlite3.SQLITE_IOERR_SHORT_READ
    )


class SqliteFile:
    """Opens the file and keeps the connection. Not for several threads at once.

    Args:
        path: The database. Its folder is created.
        busy_seconds: Longest wait for another process.
        on_new: Called when the tables are created, while no other process can open the file.
    """

    def __init__(self, path: Path, busy_seconds: float, on_new: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._busy_seconds = busy_seconds
        self._on_new = on_new
        self._connection: sqlite3.Connection | None = None
        self._opened_by = 0
        self._inode = 0
        self._inherited: list[sqlite3.Connection] = []

    def connection(self) -> sqlite3.Connection:
        """Return the open connection; open it again if the file was replaced or removed, or the process forked."""
        if self._connection is not None and self._opened_by != os.getpid():
            # Closing a connection that was inherited by a fork would release the parent's locks.
            self._inherited.append(self._connection)
            self._connection = None
        if self._connection is not None and self._inode != _inode(self._path):
            self.close()
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked():
                self._connection, self._opened_by = self._open(), os.getpid()
        return self._connection

    def rebuild(self) -> None:
        """Replace the damaged file by an empty one, unless another process has done so already."""
        seen = self._inode
        self.close()
        with self._locked():
            if seen and seen != _inode(self._path):
                return
            # The log goes first: a new database must not find the log of the old one.
            for suffix in ("-wal", "-shm", ""):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the connection; the next use opens it again."""
        connection, self._connection, self._inode = self._connection, None, 0
        if connection is not None:
            connection.close()

    def _open(self) -> sqlite3.Connection:
        # Entries are private. SQLite gives its log and index files the permissions of the database.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        self._inode = _inode(self._path)
        connection = sqlite3.connect(
            self._path, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False
        )
        connection.text_factory = bytes  # damaged text is then a wrong value, not an error while fetching the row
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a power failure loses the last entries at most
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            tables = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
            if tables < _N_TABLES:
                connection.executescript(_SCHEMA)
                self._on_new()
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Stop other processes from opening or replacing the file meanwhile."""
        if fcntl is None:
            yield
            return
        descriptor = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + self._busy_seconds
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.002)
            yield
        finally:
            os.close(descriptor)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    # IMMEDIATE takes the write lock at the start. Taking it later fails at once where another process is writing.
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise
    connection.execute("COMMIT")


def used_bytes(connection: sqlite3.Connection) -> int:
    """Return the bytes of the database without its free pages, and of the files that it names."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    (file_bytes,) = connection.execute("SELECT coalesce(sum(n_bytes), 0) FROM files").fetchone()
    return int((pages - free) * page_bytes + file_bytes)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
