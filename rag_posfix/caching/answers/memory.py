"""The tier in memory: least recently used entries go first, bounded by their number and by their bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rag_posfix.caching.tagged_lru import TaggedLRU
from rag_posfix.caching.tier import Counters, TierStats
from rag_posfix.errors import CacheError

__all__ = ["MemoryCache"]

_ENTRY_OVERHEAD_BYTES = 512  # the key, the tags and the objects around a value, roughly


@dataclass(frozen=True, slots=True)
class _Entry:
    value: bytes
    expires_at: float
    tags: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.value) + _ENTRY_OVERHEAD_BYTES


class MemoryCache:
    """Keeps entries in this process.

    Args:
        max_entries: Most entries held, >= 1.
        max_bytes: Most bytes held, >= 1024; a larger value is not kept.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        *,
        max_entries: int = 1024,
        max_bytes: int = 64 * 1024**2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_entries < 1:
            raise CacheError(f"memory cache: max_entries={max_entries} must be >= 1; leave the tier out instead of 0")
        if max_bytes < 1024:
            raise CacheError(f"memory cache: max_bytes={max_bytes} must be >= 1024")
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._entries = TaggedLRU[_Entry](max_bytes)
        self._counters = Counters()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """``memory``."""
        return "memory"

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.expires_at <= self._clock():
                del self._entries[key]
                entry = None
        self._counters.add("misses" if entry is None else "hits")
        return None if entry is None else entry.value

    def set(self, key: str, value: bytes, ttl_seconds: float, tags: Sequence[str] = ()) -> None:
        """Keep ``value`` for ``ttl_seconds``, unless it is larger than the whole tier."""
        entry = _Entry(value, self._clock() + ttl_seconds, tuple(tags))
        with self._lock:
            if ttl_seconds <= 0 or entry.size > self._max_bytes:
                self._entries.pop(key, None)
            else:
                self._entries.add(key, entry, self._max_entries)

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Drop every entry with one of ``tags``; return how many there were."""
        with self._lock:
            keys = {key for tag in tags for key in self._entries.by_tag.get(tag, ())}
            for key in keys:
                del self._entries[key]
        return len(keys)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, sorted."""
        with self._lock:
            now = self._clock()
            held = [key for key, entry in self._entries.items() if entry.expires_at > now]
        return sorted(key for key in held if key.startswith(prefix))

    def clear(self) -> int:
        """Drop every entry; return how many there were."""
        with self._lock:
            count = len(self._entries)
            self._entries.clear()
        return count

    def stats(self) -> TierStats:
        """Return what the tier has done and holds."""
        with self._lock:
            entries, size, evictions = len(self._entries), int(self._entries.currsize), self._entries.evictions
        return TierStats(
            name=self.name,
            hits=self._counters["hits"],
            misses=self._counters["misses"],
            evictions=evictions,
            entries=entries,
            bytes=size,
        )

    def close(self) -> None:
        """Drop every entry."""
        self.clear()
