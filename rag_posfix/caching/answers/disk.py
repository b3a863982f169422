"""The disk tier of the answer cache: one sqlite file, shared by the processes of a machine and persistent.

Damage is a miss: each entry has a checksum, and a file that sqlite cannot read is replaced by an empty one. A full,
read-only or busy disk is a miss as well.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rag_posfix.caching.answers.seal import seal, unseal
from rag_posfix.caching.answers.tier import ANSWER_BACKENDS, ANSWER_CACHE
from rag_posfix.caching.backends import Locality
from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.sqlite_file import SqliteFile, is_damage, is_refusal
from rag_posfix.caching.store_access import StoreAccess, StoreFailures
from rag_posfix.caching.tier import Counters, TierStats
from rag_posfix.errors import CacheError
from rag_posfix.settings import CacheSettings

_MIN_BYTES = 128 * 1024
_FOLDER = "answers"
_FILE_NAME = "answers-v1.sqlite3"
_TOUCH_SECONDS = 1.0  # the time of last use is written at most this often
_ROWS_PER_EVICTION = 16
_EXPIRED_ROWS_PER_WRITE = 64
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class DiskCache:
    """Keeps entries in a folder.

    Args:
        folder: Where the file is; created when it is first needed.
        max_bytes: Most bytes of the file, >= 131072; the least recently used entries go first. Its write-ahead log
            adds up to 4 MiB.
        busy_seconds: Longest wait for another thread or process.
        breaker: Decides when a failing disk is asked again.
        clock: Seconds since 1970, the same for every process that shares the folder.

    Raises:
        CacheError: ``max_bytes`` is too small.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = 256 * 1024**2,
        busy_seconds: float = 0.05,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < _MIN_BYTES:
            raise CacheError(f"disk cache: max_bytes={max_bytes} must be >= {_MIN_BYTES}, or 0 to have no disk tier")
        self._file = SqliteFile(folder / _FILE_NAME, busy_seconds)
        self._max_bytes = max_bytes
        self._busy_seconds = busy_seconds
        self._breaker = breaker or CircuitBreaker()
        self._clock = clock
        self._counters = Counters()
        failures = StoreFailures(ANSWER_CACHE, self._counters, self._breaker, (sqlite3.Error, OSError), is_refusal)
        self._reads = StoreAccess(f"reading {folder}", failures)
        self._writes = StoreAccess(f"writing {folder}", failures)
        self._lock = threading.Lock()
        self._closed = False

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None."""
        value = self._run(lambda connection: self._get(connection, key), self._reads)
        self._counters.add("misses" if value is None else "hits")
        return value

    def set(self, key: str, value: bytes, ttl_seconds: float, tags: Sequence[str] = ()) -> None:
        """Keep ``value`` for ``ttl_seconds``, unless it is larger than a quarter of the whole tier."""
        if ttl_seconds > 0 and len(value) <= self._max_bytes // 4:
            self._run(lambda connection: self._set(connection, key, value, ttl_seconds, tags), self._writes)

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were."""

        def drop(connection: sqlite3.Connection) -> int:
            statement = "DELETE FROM entries WHERE key IN (SELECT key FROM tags WHERE tag = ?)"
            with _transaction(connection):
                return sum(connection.execute(statement, (tag,)).rowcount for tag in tags)

        return self._delete(drop)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, sorted; none if the disk fails."""

        def held(connection: sqlite3.Connection) -> list[str]:
            statement = "SELECT key FROM entries WHERE substr(key, 1, ?) = ? AND expires_at > ?"
            rows = connection.execute(statement, (len(prefix), prefix, self._clock()))
            return [key.decode("utf-8", "replace") for (key,) in rows]

        return sorted(self._run(held, self._reads) or [])

    def clear(self) -> int:
        """Delete every entry and shrink the file; return how many entries there were."""

        def drop(connection: sqlite3.Connection) -> int:
            with _transaction(connection):
                count = connection.execute("DELETE FROM entries").rowcount
            # Deleted rows stay readable in the file until it is rewritten. A busy file is rewritten another time.
            with suppress(sqlite3.OperationalError):
                connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return count

        return self._delete(drop)

    def stats(self) -> TierStats:
        """Return what the tier has done and holds."""

        def measure(connection: sqlite3.Connection) -> tuple[int, int]:
            return connection.execute("SELECT count(*) FROM entries").fetchone()[0], _used_bytes(connection)

        entries, size = self._run(measure, self._reads) or (None, None)
        return TierStats.counted(
            self.name, self._counters, entries=entries, n_bytes=size, available=self._breaker.closed
        )

    def close(self) -> None:
        """Close the file; every later ``get`` is a miss."""
        with self._lock:
            self._closed = True
            self._file.close()

    def _get(self, connection: sqlite3.Connection, key: str) -> bytes | None:
        now = self._clock()
        row = connection.execute("SELECT value, expires_at, used_at FROM entries WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        sealed, expires_at, used_at = row
        value = unseal(key, sealed) if isinstance(expires_at, float) and isinstance(used_at, float) else None
        if value is None:
            self._counters.add("corrupt")
        if value is None or expires_at <= now:
            with suppress(sqlite3.OperationalError):
                connection.execute("DELETE FROM entries WHERE key = ?", (key,))
            return None
        if abs(now - used_at) >= _TOUCH_SECONDS:
            # A disk that has become read-only still serves its entries.
            with suppress(sqlite3.OperationalError):
                connection.execute("UPDATE entries SET used_at = ? WHERE key = ?", (now, key))
        return value

    def _set(
        self, connection: sqlite3.Connection, key: str, value: bytes, ttl_seconds: float, tags: Sequence[str]
    ) -> None:
        now = self._clock()
        with _transaction(connection):
            connection.execute(
                "DELETE FROM entries WHERE key IN (SELECT key FROM entries WHERE expires_at <= ? LIMIT ?)",
                (now, _EXPIRED_ROWS_PER_WRITE),
            )
            connection.execute("DELETE FROM entries WHERE key = ?", (key,))
            connection.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?)", (key, seal(key, value), now + ttl_seconds, now)
            )
            connection.executemany("INSERT OR IGNORE INTO tags VALUES (?, ?)", [(tag, key) for tag in tags])
            self._evict(connection, key)

    def _evict(self, connection: sqlite3.Connection, newest: str) -> None:
        while _used_bytes(connection) > self._max_bytes:
            evicted = connection.execute(
                "DELETE FROM entries WHERE key IN (SELECT key FROM entries WHERE key != ? ORDER BY used_at LIMIT ?)",
                (newest, _ROWS_PER_EVICTION),
            ).rowcount
            if not evicted:
                return
            self._counters.add("evictions", evicted)

    def _delete(self, operation: Callable[[sqlite3.Connection], int]) -> int:
        count = self._run(operation, self._writes, ignore_breaker=True)
        if count is None:
            _logger.warning("answer cache: the disk tier could not drop entries; they stay until they expire")
        return count or 0

    def _run(
        self, operation: Callable[[sqlite3.Connection], _T], access: StoreAccess, *, ignore_breaker: bool = False
    ) -> _T | None:
        """Return what ``operation`` returns for the connection, or None if the disk fails or the breaker is open."""
        if not self._lock.acquire(timeout=self._busy_seconds):
            self._counters.add("errors")
            return None
        try:
            if self._closed:
                return None
            return access.call(lambda: self._run_on_file(operation), ignore_breaker=ignore_breaker)
        finally:
            self._lock.release()

    def _run_on_file(self, operation: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return self._run_or_rebuild(operation)
        except (sqlite3.Error, OSError) as error:
            if not is_refusal(error):
                with suppress(sqlite3.Error):
                    self._file.close()  # the next operation opens it again
            raise

    def _run_or_rebuild(self, operation: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return operation(self._file.connection())
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
        self._counters.add("corrupt")
        self._file.rebuild()
        return operation(self._file.connection())


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    # IMMEDIATE takes the write lock at the start. Taking it later fails at once where another process is writing.
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise
    connection.execute("COMMIT")


def _used_bytes(connection: sqlite3.Connection) -> int:
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    return int((pages - free) * page_bytes)


@ANSWER_BACKENDS.register(DiskCache.name, Locality.MACHINE)
def _open(settings: CacheSettings, cache_dir: Path) -> DiskCache | None:
    return DiskCache(cache_dir / _FOLDER, max_bytes=settings.disk_bytes) if settings.disk_bytes else None
