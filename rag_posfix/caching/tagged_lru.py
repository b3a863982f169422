"""A cache in memory with a size limit, least-recently-used eviction, and deletion by tag."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rag_posfix.caching.tier import Counters, TierStats

_V = TypeVar("_V")


@dataclass(frozen=True, slots=True, eq=False)
class _Entry(Generic[_V]):
    value: _V
    n_bytes: int
    tags: tuple[str, ...]


class TaggedLRU(Generic[_V]):
    """Values under keys. Several threads may use it at once.

    Args:
        max_bytes: Size limit in bytes. A larger value is not stored.
        counters: Counts ``evictions``.
        max_entries: Maximum number of entries, or None for no limit.
    """

    def __init__(self, max_bytes: int, counters: Counters, max_entries: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._counters = counters
        self._entries: OrderedDict[str, _Entry[_V]] = OrderedDict()  # least recently used first
        self._keys_by_tag: defaultdict[str, set[str]] = defaultdict(set)
        self._n_bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def get(self, key: str) -> _V | None:
        """Return the value of ``key``, or None. It is now the most recently used."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.value

    def put(self, key: str, value: _V, n_bytes: int, tags: Sequence[str] = ()) -> None:
        """Store ``value`` under ``key``, replacing an earlier value; evict entries until it fits.

        Args:
            n_bytes: Size of the value. If it exceeds the limit, ``key`` has no value afterwards.
        """
        with self._lock:
            self._discard(key)
            if self._closed or n_bytes > self._max_bytes:
                return
            while self._n_bytes + n_bytes > self._max_bytes or len(self._entries) == self._max_entries:
                self._discard(next(iter(self._entries)))
                self._counters.add("evictions")
            self._entries[key] = _Entry(value, n_bytes, tuple(tags))
            self._n_bytes += n_bytes
            for tag in tags:
                self._keys_by_tag[tag].add(key)

    def remove(self, key: str, value: _V) -> None:
        """Remove ``key`` if its value is ``value``, not one that another thread has stored since."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.value is value:
                self._discard(key)

    def items(self) -> list[tuple[str, _V]]:
        """Return every key and its value, least recently used first."""
        with self._lock:
            return [(key, entry.value) for key, entry in self._entries.items()]

    def tags(self) -> frozenset[str]:
        """Return every tag that an entry has."""
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

    def stats(self, name: str) -> TierStats:
        """Return the statistics of a tier called ``name`` that keeps its entries here."""
        with self._lock:
            entries, n_bytes = len(self._entries), self._n_bytes
        return TierStats.counted(name, self._counters, entries=entries, n_bytes=n_bytes)

    def close(self) -> None:
        """Delete every entry and store no more."""
        with self._lock:
            self._closed = True
        self.clear()

    def _discard(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._n_bytes -= entry.n_bytes
        for tag in entry.tags:
            keys = self._keys_by_tag[tag]
            keys.discard(key)
            if not keys:
                del self._keys_by_tag[tag]
