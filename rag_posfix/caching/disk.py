"""The disk tier: an SQLite file, and a file for each large value, shared by the processes of a machine and persistent.

Damage is a miss: each value has a checksum, and an SQLite file that cannot be read is replaced by an empty one. A
full, read-only or busy disk is a miss as well.

An SQLite file of tagged entries that several processes share. A damaged file is replaced by an empty one.

The write-ahead log (WAL) needs memory shared between the processes: the file must be on a local disk, not on a network
file system.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from rag_posfix.caching.tier import CircuitBreaker, Codec, Counters, Guard, TierStats, V, map_in
from rag_posfix.errors import CacheError

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


_MIN_BYTES = 64 * 1024
INLINE_BYTES = 64 * 1024  # a larger value has a file of its own
_FILES_FOLDER = "values"
_FILE_NAME = re.compile(r"[0-9a-f]{32}")
# Where keys and values were stored before there was an SQLite file for them, and what was unfinished then.
_OLD_FILES = ("?/?/*.kv", "incoming/*")
_OLD_FILE_NAME = re.compile(r"[0-9a-f]{40}\.kv|[0-9a-f]{32}")
_UNFINISHED_SECONDS = 15 * 60.0  # no write takes that long
_DELETE_SECONDS = 10.0
_TOUCH_SECONDS = 60.0  # the time of last use is written at most this often
_EXPIRED_ROWS_PER_WRITE = 64
_REJECTIONS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class _Row(NamedTuple):
    """What the tables hold of an entry. The file may be damaged: values can be of any type."""

    value: Any
    expires_at: Any
    used_at: Any
    name: Any
    n_bytes: Any


class _BusyError(Exception):
    """Other threads use the file; the disk is well, so the circuit breaker stays as it is."""


class DiskTier(Generic[V]):
    """Stores entries in a folder on a local disk.

    Args:
        folder: Created when it is first needed.
        codec: Serialises the entries.
        max_bytes: Size limit of all files, >= 65536; the least recently used entries are evicted first. The
            write-ahead log adds up to 4 MiB. An entry larger than a quarter is not stored.
        busy_seconds: Longest wait for another thread or process.
        breaker: Decides when a failing disk is tried again.
        clock: Seconds since 1970, the same for every process that shares the folder.

    Raises:
        CacheError: ``max_bytes`` is too small.
    """

    name = "disk"
    is_synchronous = False

    def __init__(
        self,
        folder: Path,
        codec: Codec[V],
        *,
        max_bytes: int = 256 * 1024**2,
        busy_seconds: float = 0.05,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < _MIN_BYTES:
            raise CacheError(
                f"{codec.cache} on disk: max_bytes={max_bytes} must be >= {_MIN_BYTES}; set 0 in the settings to have "
                "no disk tier"
            )
        self._folder = folder
        self._files = folder / _FILES_FOLDER
        self._codec = codec
        self._max_bytes = max_bytes
        self._busy_seconds = busy_seconds
        self._clock = clock
        self._counters = Counters()
        self._breaker = breaker or CircuitBreaker()
        self._guard = Guard(codec.cache, self._counters, self._breaker, (sqlite3.Error, OSError), _is_rejection)
        self._reading, self._writing = f"reading {folder}", f"writing {folder}"
        self._file = SqliteFile(folder / codec.file_name, busy_seconds, self._remove_all_files)
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="rag-posfix-disk")
        self._lock = threading.Lock()
        self._looked_for_unfinished = False
        self._closed = False

    def get_many(self, keys: Mapping[str, Any]) -> dict[str, V]:
        """Return the stored entries of ``keys``; a damaged or expired entry is removed."""
        if self._closed:
            return {}
        rows = self._try(self._reading, partial(self._on_file, lambda connection: _rows(connection, keys)), None)
        if rows is None:  # counted as skipped or as an error
            return {}
        unusable: list[str] = []
        entries = map_in(self._readers, lambda item: self._load(*item, keys[item[0]], unusable), list(rows.items()))
        hits = {key: entry for key, entry in zip(rows, entries, strict=True) if entry is not None}
        current_time = self._clock()
        used = [key for key in hits if abs(current_time - rows[key].used_at) >= _TOUCH_SECONDS]
        if unusable or used:
            self._try(
                self._reading, partial(self._on_file, partial(self._record_use, unusable, used, current_time)), None
            )
        self._counters.add("hits", len(hits))
        self._counters.add("misses", len(keys) - len(hits))
        return hits

    def put_many(self, entries: Mapping[str, V]) -> None:
        """Store ``entries``, unless the disk rejects them."""
        for key, entry in entries.items():
            if not self._closed and entry.expires_at > self._clock():
                self._try(self._writing, partial(self._put, key, entry), None)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, sorted; none if the disk fails."""

        def select(connection: sqlite3.Connection) -> list[str]:
            statement = "SELECT key FROM entries WHERE substr(key, 1, ?) = ? AND expires_at > ?"
            rows = connection.execute(statement, (len(prefix), prefix, self._clock()))
            return sorted(key.decode("utf-8", "replace") for (key,) in rows)

        return self._try(self._reading, partial(self._on_file, select), [])

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were."""

        def delete(connection: sqlite3.Connection) -> int:
            with transaction(connection):
                return sum(
                    self._remove(connection, "key IN (SELECT key FROM tags WHERE tag = ?)", tag) for tag in tags
                )

        return self._delete(delete)

    def clear(self) -> int:
        """Delete every entry and shrink the file; return how many entries there were."""

        def delete(connection: sqlite3.Connection) -> int:
            with transaction(connection):
                count = self._remove(connection, "true")
            # Deleted rows stay readable in the file until it is rewritten. A busy file is rewritten another time.
            with suppress(sqlite3.OperationalError):
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return count

        return self._delete(delete)

    def stats(self) -> TierStats:
        """Return what the tier has done and holds, the index included."""

        def measure(connection: sqlite3.Connection) -> tuple[int | None, int | None]:
            (count,) = connection.execute("SELECT count(*) FROM entries").fetchone()
            return count, used_bytes(connection) if count else 0

        unknown: tuple[int | None, int | None] = (None, None)
        entries, size = self._try(self._reading, partial(self._on_file, measure), unknown)
        return TierStats.counted(
            self.name, self._counters, entries=entries, n_bytes=size, available=self._breaker.closed
        )

    def close(self) -> None:
        """Close the file and end the threads."""
        with self._lock:
            self._closed = True
            self._file.close()
        self._readers.shutdown()

    def _load(self, key: str, row: _Row, expected: Any, unusable: list[str]) -> V | None:
        """Return the entry of ``row``; without a usable one, add ``key`` to ``unusable``."""
        reading_files = f"reading files in {self._folder}"
        data: object = row.value
        if row.name is not None:
            try:
                data = self._read_file(row)
            except FileNotFoundError:  # another process has just removed it
                unusable.append(key)
                return None
            except OSError as error:  # the entry may be readable later, and others are now
                self._guard.failed(reading_files, error)
                return None
            self._guard.worked(reading_files)
        is_sound = isinstance(row.expires_at, float) and isinstance(row.used_at, float)
        entry = self._codec.decode(key, data, expected) if is_sound else None
        self._counters.add("corrupt", int(entry is None))
        if entry is None or row.expires_at <= self._clock():
            unusable.append(key)
            return None
        return entry

    def _read_file(self, row: _Row) -> memoryview | None:
        """Return the content of the file, None if it is not what the row describes."""
        path = self._path(row.name)
        if path is None:
            return None
        # Opening a named pipe in place of a file must not hang.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | _NONBLOCK)
        with open(descriptor, "rb", buffering=0) as file:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode) or info.st_size != row.n_bytes:
                return None
            data = self._codec.allocate(info.st_size)
            filled = 0
            while filled < len(data) and (count := file.readinto(data[filled:])):
                filled += count
            return data[:filled]

    def _record_use(
        self, unusable: Iterable[str], used: Iterable[str], current_time: float, connection: sqlite3.Connection
    ) -> None:
        """Remove unusable entries and write when entries were used; a disk that became read-only still serves them."""
        with suppress(sqlite3.OperationalError, PermissionError), transaction(connection):
            for key in unusable:
                self._remove(connection, "key = ?", key)
            connection.executemany(
                "UPDATE entries SET used_at = ? WHERE key = ?", [(current_time, key) for key in used]
            )

    def _put(self, key: str, entry: V) -> None:
        buffers = self._codec.encode(key, entry)
        n_bytes = sum(map(len, buffers))
        if n_bytes > self._max_bytes // 4:  # an earlier value is not that of the key any more
            self._on_file(partial(self._record_use, [key], (), self._clock()))
            return
        if n_bytes <= INLINE_BYTES:
            self._on_file(lambda connection: self._insert(connection, key, entry, b"".join(buffers)))
            return
        # The file before its row: what is in the table is always complete. No fsync: a file that a power failure
        # leaves incomplete fails its checksum. The table before both: all files are removed where it is new.
        self._on_file(self._remove_unfinished)
        path = self._files / secrets.token_hex(16)
        self._files.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            with open(os.open(path, flags, 0o600), "wb") as file:
                file.writelines(buffers)
            self._on_file(lambda connection: self._insert(connection, key, entry, b"", (path.name, n_bytes)))
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise

    def _insert(
        self, connection: sqlite3.Connection, key: str, entry: V, value: bytes, file: tuple[str, int] | None = None
    ) -> None:
        current_time = self._clock()
        with transaction(connection):
            self._remove(connection, f"expires_at <= ? LIMIT {_EXPIRED_ROWS_PER_WRITE}", current_time)
            self._remove(connection, "key = ?", key)
            connection.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?)", (key, value, float(entry.expires_at), current_time)
            )
            if file is not None:
                connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (key, *file))
            connection.executemany("INSERT OR IGNORE INTO tags VALUES (?, ?)", [(tag, key) for tag in entry.tags])
            while used_bytes(connection) > self._max_bytes:
                if not self._remove(connection, "key != ? ORDER BY used_at LIMIT 1", key):
                    break
                self._counters.add("evictions")

    def _remove(self, connection: sqlite3.Connection, condition: str, *parameters: object) -> int:
        """Delete the entries for which ``condition`` holds, with their files; return how many there were.

        A file goes before its row is committed: a row without a file is a miss, a file without a row would be left.
        """
        keys = f"SELECT key FROM entries WHERE {condition}"
        names = connection.execute(f"SELECT name FROM files WHERE key IN ({keys})", parameters).fetchall()
        count = connection.execute(f"DELETE FROM entries WHERE key IN ({keys})", parameters).rowcount
        for (name,) in names:
            if (path := self._path(name)) is not None:
                path.unlink(missing_ok=True)
        return count

    def _path(self, name: object) -> Path | None:
        """Return the path of a file of ours; None if a damaged table names another."""
        text = name.decode("ascii", "replace") if isinstance(name, bytes) else ""
        return self._files / text if _FILE_NAME.fullmatch(text) else None

    def _remove_unfinished(self, connection: sqlite3.Connection) -> None:
        """Once per process, remove old files without a row: a process ended between writing both."""
        if self._looked_for_unfinished:
            return
        self._looked_for_unfinished = True
        names = {name for (name,) in connection.execute("SELECT name FROM files")}
        for path in self._files.glob("*"):
            with suppress(OSError):
                if path.name.encode() not in names and self._clock() - path.stat().st_mtime > _UNFINISHED_SECONDS:
                    path.unlink()

    def _remove_all_files(self) -> None:
        """Remove the files of an SQLite file that was damaged, or of a version that had none."""
        count = 0
        for path in (path for pattern in (f"{_FILES_FOLDER}/*", *_OLD_FILES) for path in self._folder.glob(pattern)):
            if _OLD_FILE_NAME.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()
                    count += 1
        if count:
            _logger.warning(
                "%s: the index in %s is new; removed %d files without an entry, which are computed again when needed",
                self._codec.cache,
                self._folder,
                count,
            )

    def _delete(self, operation: Callable[[sqlite3.Connection], int]) -> int:
        """Return how many entries ``operation`` deleted, 0 if the disk fails.

        Deleting is rare and must not be lost: it ignores the circuit breaker, and waits longer for others.
        """

        def wait(connection: sqlite3.Connection) -> int:
            connection.execute(f"PRAGMA busy_timeout = {int(_DELETE_SECONDS * 1000)}")
            try:
                return operation(connection)
            finally:
                connection.execute(f"PRAGMA busy_timeout = {int(self._busy_seconds * 1000)}")

        delete = partial(self._on_file, wait, _DELETE_SECONDS)
        count = self._try(self._writing, delete, None, ignore_breaker=True)
        if count is None and not self._closed:
            _logger.warning("%s: could not drop entries; delete %s by hand", self._codec.cache, self._folder)
        return count or 0

    def _try(self, use: str, operation: Callable[[], _T], default: _T, *, ignore_breaker: bool = False) -> _T:
        try:
            return self._guard.call(use, operation, default, ignore_breaker=ignore_breaker)
        except _BusyError:
            self._counters.add("errors")
            return default

    def _on_file(self, operation: Callable[[sqlite3.Connection], _T], busy_seconds: float | None = None) -> _T:
        """Return what ``operation`` returns for the connection; replace a damaged file and try again."""
        with self._locked(busy_seconds or self._busy_seconds):
            try:
                try:
                    return operation(self._file.connection())
                except sqlite3.DatabaseError as error:
                    if not is_damage(error):
                        raise
                self._counters.add("corrupt")
                self._file.rebuild()
                return operation(self._file.connection())
            except (sqlite3.Error, OSError) as error:
                if not _is_rejection(error):
                    with suppress(sqlite3.Error):
                        self._file.close()  # the next operation opens it again
                raise

    @contextmanager
    def _locked(self, busy_seconds: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=busy_seconds):
            raise _BusyError
        try:
            if self._closed:
                raise _BusyError
            yield
        finally:
            self._lock.release()


def _rows(connection: sqlite3.Connection, keys: Iterable[str]) -> dict[str, _Row]:
    columns = "value, expires_at, used_at, name, n_bytes"
    statement = f"SELECT {columns} FROM entries LEFT JOIN files USING (key) WHERE entries.key = ?"
    rows = ((key, connection.execute(statement, (key,)).fetchone()) for key in keys)
    return {key: _Row(*row) for key, row in rows if row is not None}


def _is_rejection(error: BaseException) -> bool:
    """Whether the disk is full or read-only: reads may still work."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return (code & 0xFF) in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY}
    return isinstance(error, OSError) and error.errno in _REJECTIONS
