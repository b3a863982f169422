"""The tier on disk: one file per entry, shared by the processes of a machine, that survives restarts.

A damaged, foreign or unreadable file is a miss, and so is a full or read-only disk. Tags are in the head of each file:
nothing beside the files can be lost or disagree with them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.health import Health
from rag_posfix.caching.kv.entry import EntryShape, PassageKV, buffer, head_bytes, pieces, read, read_tags
from rag_posfix.caching.kv.files import EntryFile, EntryFolder
from rag_posfix.caching.kv.readers import Readers
from rag_posfix.caching.tier import Counters, TierStats
from rag_posfix.errors import CacheError

__all__ = ["DiskPassages"]

_MIN_BYTES = 64 * 1024
_TOUCH_SECONDS = 60.0  # a hit writes at most this often that it was one
_SHARE = 16  # after so much of its bound a process lists the files again, and what it then frees to be ahead
_logger = logging.getLogger(__name__)


class DiskPassages:
    """Keeps entries in a folder.

    Args:
        folder: Where the files are; made when it is first needed.
        max_bytes: Most bytes of all files, >= 65536; least recently used ones go first. Each further process that
            writes into the folder may exceed it by a sixteenth. An entry of more than a quarter is not kept.
        breaker: Decides when a disk that refuses writes is asked again. Reading goes on meanwhile.
        clock: Seconds since 1970, the same for every process that shares the folder.

    Raises:
        CacheError: ``max_bytes`` is too small.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < _MIN_BYTES:
            raise CacheError(
                f"passages on disk: max_bytes={max_bytes} must be >= {_MIN_BYTES}, or 0 in the settings to have no "
                "such tier"
            )
        self._folder = EntryFolder(folder)
        self._max_bytes = max_bytes
        self._breaker = breaker or CircuitBreaker()
        self._clock = clock
        # Apart: a full disk refuses every write and serves every read, which would log each question.
        self._reads = Health(f"reading {folder}", "passage store")
        self._writes = Health(f"writing {folder}", "passage store")
        self._readers = Readers()
        self._counters = Counters()
        self._write_lock = threading.Lock()
        self._used: int | None = None  # bytes of all files when last listed, and of those written since
        self._unlisted = 0  # bytes written since
        self._closed = False

    @property
    def name(self) -> str:
        """``disk``."""
        return "disk"

    @property
    def immediate(self) -> bool:
        """False: megabytes are hashed and written."""
        return False

    def get_many(self, keys: Mapping[str, EntryShape]) -> dict[str, PassageKV]:
        """Return those of ``keys`` that are held and are as expected; a file that holds something else is removed."""
        if self._closed:
            return {}
        entries = self._readers.map(lambda item: self._get(*item), keys.items())
        found = {key: entry for key, entry in zip(keys, entries, strict=True) if entry is not None}
        self._counters.add("hits", len(found))
        self._counters.add("misses", len(keys) - len(found))
        return found

    def put_many(self, entries: Mapping[str, PassageKV]) -> None:
        """Keep ``entries``, unless the disk refuses."""
        for key, entry in entries.items():
            if self._closed or not self._breaker.allow():
                return
            try:
                self._put(key, entry)
            except OSError as error:
                self._counters.add("errors")
                self._writes.failed(error)
                self._breaker.failure()
            else:
                self._writes.worked()
                self._breaker.success()

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Drop every entry with one of ``tags``; return how many there were.

        Cost: the head of every file is read. A file without a readable head is removed, as it could be one of them.
        """
        unwanted = set(tags)

        def concerns(file: EntryFile) -> bool:
            held = self._tags(file)
            if held is None:
                self._counters.add("corrupt")
            return held is None or not unwanted.isdisjoint(held)

        return self._remove_where(concerns)

    def clear(self) -> int:
        """Drop every entry; return how many there were."""
        return self._remove_where(lambda _: True)

    def stats(self) -> TierStats:
        """Return what the tier has done and holds. Cost: the files are listed."""
        entries: int | None = None
        size: int | None = None
        with suppress(OSError):
            sizes = [file.n_bytes for file in self._folder.entries()]
            entries, size = len(sizes), sum(sizes)
        return TierStats(
            name=self.name,
            hits=self._counters["hits"],
            misses=self._counters["misses"],
            errors=self._counters["errors"],
            corrupt=self._counters["corrupt"],
            evictions=self._counters["evictions"],
            entries=entries,
            bytes=size,
            available=self._breaker.closed,
        )

    def close(self) -> None:
        """End the threads; every later ``get_many`` is a miss."""
        self._closed = True
        self._readers.close()

    def _get(self, key: str, expected: EntryShape) -> PassageKV | None:
        path = self._folder.path(key)
        try:
            data, used_at = self._folder.read(path, expected.most_bytes, buffer)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._counters.add("errors")
            self._reads.failed(error)
            return None
        self._reads.worked()
        entry = read(key, data, expected)
        # A disk that has become read-only still serves what it holds.
        with suppress(OSError):
            if entry is None:
                self._counters.add("corrupt")
                path.unlink()
            elif abs(self._clock() - used_at) >= _TOUCH_SECONDS:
                self._folder.touch(path, self._clock())
        return entry

    def _put(self, key: str, entry: PassageKV) -> None:
        data = pieces(key, entry)
        size = sum(map(len, data))
        if size > self._max_bytes // 4:
            return
        with self._write_lock:
            used = self._make_room(size)
            self._folder.write(self._folder.path(key), data, self._clock())
            self._used = used + size
            self._unlisted += size

    def _make_room(self, n_bytes: int) -> int:
        """Remove the least recently used files where ``n_bytes`` more would be too many; return what is left."""
        share = self._max_bytes // _SHARE
        if self._used is not None and self._used + n_bytes <= self._max_bytes and self._unlisted < share:
            return self._used
        self._folder.remove_leftovers(self._clock())
        files = sorted(self._folder.entries(), key=lambda file: file.used_at)
        used = sum(file.n_bytes for file in files)
        if used + n_bytes > self._max_bytes:
            for file in files:
                if used + n_bytes <= self._max_bytes - share:
                    break
                file.path.unlink(missing_ok=True)
                self._counters.add("evictions")
                used -= file.n_bytes
        self._unlisted = 0
        return used

    def _tags(self, file: EntryFile) -> tuple[str, ...] | None:
        with file.path.open("rb") as opened:
            start = opened.read(64)
            end = head_bytes(start)
            return None if end is None else read_tags(start + opened.read(max(0, end - len(start))))

    def _remove_where(self, concerns: Callable[[EntryFile], bool]) -> int:
        count = failures = 0
        try:
            self._folder.remove_leftovers(self._clock())
            for file in self._folder.entries():
                try:
                    if concerns(file):
                        file.path.unlink()
                        count += 1
                except FileNotFoundError:
                    continue
                except OSError:
                    failures += 1
        except OSError:
            failures += 1
        if failures:
            self._counters.add("errors", failures)
            _logger.warning("passage store: the disk tier could not drop every entry it had to; remove them by hand")
        with self._write_lock:
            self._used = None
        return count
