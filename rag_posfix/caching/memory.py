"""The memory tier: entries as objects, with a size limit; the least recently used entry is evicted first."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

from rag_posfix.caching.guard import Counters
from rag_posfix.caching.tier import TierStats, V
from rag_posfix.errors import CacheError

_MIN_BYTES = 4096
_OVERHEAD_BYTES = 1024  # the key, the tags and the Python objects around an entry, roughly


class MemoryTier(Generic[V]):
    """Stores entries in this process; tensors stay on their device.

    Args:
        max_bytes: Size limit in bytes, >= 4096; each entry counts 1 KiB more than its size. A larger entry is not
            stored.
        max_entries: Maximum number of entries, >= 1; None for no limit.
        clock: Seconds since 1970.

    Raises:
        CacheError: A limit is too small.
    """

    name = "memory"
    immediate = True  # only a reference is stored

    def __init__(
        self, max_bytes: int = 1024**3, max_entries: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        if max_bytes < _MIN_BYTES or (max_entries is not None and max_entries < 1):
            raise CacheError(
                f"memory tier: max_bytes={max_bytes} must be >= {_MIN_BYTES} and max_entries={max_entries} must be "
                ">= 1; set 0 in the settings to have no such tier"
            )
        self._max_bytes = max_bytes
        self._max_entries = math.inf if max_entries is None else max_entries
        self._clock = clock
        self._counters = Counters()
        self._entries: OrderedDict[str, V] = OrderedDict()  # least recently used first
        self._keys_by_tag: defaultdict[str, set[str]] = defaultdict(set)
        self._n_bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def get_many(self, keys: Mapping[str, Any]) -> dict[str, V]:
        """Return the stored entries of ``keys``; an expired entry, or one that is not as expected, is removed."""
        hits: dict[str, V] = {}
        with self._lock:
            current_time = self._clock()
            for key, expected in keys.items():
                entry = self._entries.get(key)
                if entry is None:
                    continue
                if entry.expires_at > current_time and entry.fits(expected):
                    self._entries.move_to_end(key)
                    hits[key] = entry
                else:
                    self._discard(key)
                    self._counters.add("corrupt", int(entry.expires_at > current_time))
        self._counters.add("hits", len(hits))
        self._counters.add("misses", len(keys) - len(hits))
        return hits

    def put_many(self, entries: Mapping[str, V]) -> None:
        """Store ``entries``, replacing earlier ones; an entry that exceeds the limit leaves its key without one."""
        for key, entry in entries.items():
            n_bytes = entry.n_bytes + _OVERHEAD_BYTES
            with self._lock:
                self._discard(key)
                if self._closed or n_bytes > self._max_bytes:
                    continue
                while self._n_bytes + n_bytes > self._max_bytes or len(self._entries) >= self._max_entries:
                    self._discard(next(iter(self._entries)))
                    self._counters.add("evictions")
                self._entries[key] = entry
                self._n_bytes += n_bytes
                for tag in entry.tags:
                    self._keys_by_tag[tag].add(key)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, sorted. This is no use of their entries."""
        with self._lock:
            current_time = self._clock()
            return sorted(
                key
                for key, entry in self._entries.items()
                if key.startswith(prefix) and entry.expires_at > current_time
            )

    def tags(self) -> frozenset[str]:
        """Return the tags of all entries."""
        with self._lock:
            return frozenset(self._keys_by_tag)

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were."""
        with self._lock:
            keys = {key for tag in tags for key in self._keys_by_tag.get(tag, ())}
            for key in keys:
                self._discard(key)
        return len(keys)

    def clear(self) -> int:
        """Delete every entry; return how many there were."""
        with self._lock:
            count = len(self._entries)
            self._entries.clear()
            self._keys_by_tag.clear()
            self._n_bytes = 0
        return count

    def stats(self) -> TierStats:
        """Return what the tier has done and holds."""
        with self._lock:
            entries, n_bytes = len(self._entries), self._n_bytes
        return TierStats.counted(self.name, self._counters, entries=entries, n_bytes=n_bytes)

    def close(self) -> None:
        """Delete every entry and store no more."""
        with self._lock:
            self._closed = True
        self.clear()

    def _discard(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._n_bytes -= entry.n_bytes + _OVERHEAD_BYTES
        for tag in entry.tags:
            keys = self._keys_by_tag[tag]
            keys.discard(key)
            if not keys:
                del self._keys_by_tag[tag]
