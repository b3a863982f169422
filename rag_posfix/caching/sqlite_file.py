"""One sqlite file that several processes share, and that is started afresh when it is damaged.

WAL needs shared memory between the processes: keep the file on a local disk, not on a network one.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two processes that rebuild at the same moment may rebuild twice
    fcntl = None  # type: ignore[assignment]

__all__ = ["SqliteFile", "is_damage", "is_refusal"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, expires_at REAL NOT NULL, used_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS tags (
    tag TEXT NOT NULL, key TEXT NOT NULL REFERENCES entries (key) ON DELETE CASCADE, PRIMARY KEY (tag, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_by_use ON entries (used_at);
CREATE INDEX IF NOT EXISTS entries_by_expiry ON entries (expires_at);
CREATE INDEX IF NOT EXISTS tags_by_key ON tags (key);
"""
_WAL_BYTES = 4 * 1024**2


def is_damage(error: BaseException) -> bool:
    """Return whether ``error`` says that the file is damaged, is no database, or lost its tables."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return False
    return (code & 0xFF) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR} or (
        code == sqlite3.SQLITE_IOERR_SHORT_READ
    )


def is_refusal(error: BaseException) -> bool:
    """Return whether ``error`` says that the disk is full or read-only: reads may still work."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF) in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY}


class SqliteFile:
    """Opens the file and keeps its connection. Not for several threads at once.

    Args:
        path: The database; its folder is made.
        busy_seconds: Longest wait for another process.
    """

    def __init__(self, path: Path, busy_seconds: float) -> None:
        self._path = path
        self._busy_seconds = busy_seconds
        self._connection: sqlite3.Connection | None = None
        self._opened_by = 0
        self._inode = 0
        self._inherited: list[sqlite3.Connection] = []

    def connection(self) -> sqlite3.Connection:
        """Return the open connection; reopen it if the file was replaced or removed, or the process forked."""
        if self._connection is not None and self._opened_by != os.getpid():
            # Closing a connection inherited over a fork would drop the parent's locks.
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
        """Replace the damaged file by an empty one, unless another process did it already."""
        seen = self._inode
        self.close()
        with self._locked():
            if seen and seen != _inode(self._path):
                return
            # The log first: a new database must not find the log of the old one.
            for suffix in ("-wal", "-shm", ""):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the connection; the next use opens it again."""
        connection, self._connection, self._inode = self._connection, None, 0
        if connection is not None:
            connection.close()

    def _open(self) -> sqlite3.Connection:
        # Answers are private; sqlite gives its side files the permissions of the database.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        self._inode = _inode(self._path)
        connection = sqlite3.connect(
            self._path, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False
        )
        connection.text_factory = bytes  # damaged text then is a wrong value, not an error while fetching the row
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose the last answers, nothing else
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            if connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'index'").fetchone()[0] < 3:
                connection.executescript(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from opening or rebuilding the file."""
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


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
