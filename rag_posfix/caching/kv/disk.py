"""The disk tier of the passage KV store: one file per entry, shared by the processes of a machine, kept by restarts.

A damaged, foreign or unreadable file is a miss, and so is a full or read-only disk. Tags are in the header of each
file: there is no index that could be lost or disagree with the files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from rag_posfix.caching.backends import Locality
from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.health import Health
from rag_posfix.caching.kv.entry import (
    EntryShape,
    PassageKV,
    allocate,
    deserialize,
    header_end,
    parse_tags,
    serialize_parts,
)
from rag_posfix.caching.kv.entry_folder import EntryFile, EntryFolder
from rag_posfix.caching.kv.reader_pool import ReaderPool
from rag_posfix.caching.kv.tier import KV_BACKENDS, PASSAGE_STORE, PassageStoreOptions
from rag_posfix.caching.store_access import StoreAccess, StoreFailures
from rag_posfix.caching.tier import Counters, TierStats
from rag_posfix.errors import CacheError
from rag_posfix.folders import PASSAGES_FOLDER

_MIN_BYTES = 64 * 1024
_TOUCH_SECONDS = 60.0  # the time of last use is written at most this often
_HEADROOM = 16  # 1/16 of the bound: after writing so much the files are listed again; eviction frees so much more
_logger = logging.getLogger(__name__)


class DiskPassages:
    """Keeps entries in a folder.

    Args:
        folder: Where the files are; created when it is first needed.
        max_bytes: Most bytes of all files, >= 65536; the least recently used go first. Each further process that
            writes to the folder may exceed it by a sixteenth. An entry of more than a quarter is not kept.
        breaker: Decides when a disk that refuses writes is asked again. Reading continues meanwhile.
        clock: Seconds since 1970, the same for every process that shares the folder.

    Raises:
        CacheError: ``max_bytes`` is too small.
    """

    name = "disk"
    immediate = False  # megabytes are hashed and written

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
        self._counters = Counters()
        # The breaker is for writes alone: a missing file is no failure, and reading is cheap to try again.
        failures = StoreFailures(PASSAGE_STORE, self._counters, self._breaker, (OSError,))
        self._writes = StoreAccess(f"writing {folder}", failures)
        self._reads = Health(f"reading {folder}", PASSAGE_STORE)
        self._readers = ReaderPool()
        self._write_lock = threading.Lock()
        self._used: int | None = None  # bytes of all files when last listed, plus those written since
        self._unlisted = 0  # bytes written since the files were last listed
        self._closed = False

    def get_many(self, keys: Mapping[str, EntryShape]) -> dict[str, PassageKV]:
        """Return the entries of those of ``keys`` that are held; a file with other content is removed."""
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
            if self._closed:
                return
            self._writes.call(partial(self._put, key, entry))

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were.

        A file without a readable header is deleted, because it could be one of them. Cost: the header of every file
        is read.
        """
        unwanted = set(tags)

        def has_one(file: EntryFile) -> bool:
            held = self._tags(file)
            if held is None:
                self._counters.add("corrupt")
            return held is None or not unwanted.isdisjoint(held)

        return self._delete_where(has_one)

    def clear(self) -> int:
        """Delete every entry; return how many there were."""
        return self._delete_where(lambda _: True)

    def stats(self) -> TierStats:
        """Return what the tier has done and holds. Cost: the files are listed."""
        entries: int | None = None
        n_bytes: int | None = None
        with suppress(OSError):
            sizes = [file.n_bytes for file in self._folder.entries()]
            entries, n_bytes = len(sizes), sum(sizes)
        return TierStats.counted(
            self.name, self._counters, entries=entries, n_bytes=n_bytes, available=self._breaker.closed
        )

    def close(self) -> None:
        """End the threads; every later ``get_many`` is a miss."""
        self._closed = True
        self._readers.close()

    def _get(self, key: str, expected: EntryShape) -> PassageKV | None:
        path = self._folder.path(key)
        try:
            data, used_at = self._folder.read(path, expected.max_serialized_bytes, allocate)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._counters.add("errors")
            self._reads.failed(error)
            return None
        self._reads.worked()
        entry = deserialize(key, data, expected)
        # A disk that has become read-only still serves its entries.
        with suppress(OSError):
            if entry is None:
                self._counters.add("corrupt")
                path.unlink()
            elif abs(self._clock() - used_at) >= _TOUCH_SECONDS:
                self._folder.touch(path, self._clock())
        return entry

    def _put(self, key: str, entry: PassageKV) -> None:
        parts = serialize_parts(key, entry)
        size = sum(map(len, parts))
        if size > self._max_bytes // 4:
            return
        with self._write_lock:
            used = self._make_room(size)
            self._folder.write(self._folder.path(key), parts, self._clock())
            self._used = used + size
            self._unlisted += size

    def _make_room(self, n_bytes: int) -> int:
        """Delete the least recently used files if ``n_bytes`` more would exceed the bound; return what is left."""
        headroom = self._max_bytes // _HEADROOM
        if self._used is not None and self._used + n_bytes <= self._max_bytes and self._unlisted < headroom:
            return self._used
        self._folder.remove_unfinished(self._clock())
        files = sorted(self._folder.entries(), key=lambda file: file.used_at)
        used = sum(file.n_bytes for file in files)
        if used + n_bytes > self._max_bytes:
            for file in files:
                if used + n_bytes <= self._max_bytes - headroom:
                    break
                file.path.unlink(missing_ok=True)
                self._counters.add("evictions")
                used -= file.n_bytes
        self._unlisted = 0
        return used

    def _tags(self, file: EntryFile) -> tuple[str, ...] | None:
        with file.path.open("rb") as opened:
            start = opened.read(64)
            end = header_end(start)
            return None if end is None else parse_tags(start + opened.read(max(0, end - len(start))))

    def _delete_where(self, condition: Callable[[EntryFile], bool]) -> int:
        count = failures = 0
        try:
            self._folder.remove_unfinished(self._clock())
            for file in self._folder.entries():
                try:
                    if condition(file):
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


@KV_BACKENDS.register(DiskPassages.name, Locality.MACHINE)
def _open(settings: PassageStoreOptions, cache_dir: Path) -> DiskPassages | None:
    max_bytes = settings.disk_bytes_in(cache_dir)
    return DiskPassages(cache_dir / PASSAGES_FOLDER, max_bytes=max_bytes) if max_bytes else None
