"""The memory tier of the answer cache: bounded by entries and bytes; the least recently used entry goes first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rag_posfix.caching.answers.tier import ANSWER_BACKENDS
from rag_posfix.caching.backends import Locality
from rag_posfix.caching.tagged_lru import TaggedLRU
from rag_posfix.caching.tier import Counters, TierStats
from rag_posfix.errors import CacheError
from rag_posfix.settings import CacheSettings

_ENTRY_OVERHEAD_BYTES = 512  # the key, the tags and the Python objects around a value, roughly


@dataclass(frozen=True, slots=True)
class _Expiring:
    value: bytes
    expires_at: float


class MemoryCache:
    """Keeps entries in this process.

    Args:
        max_entries: Most entries held, >= 1.
        max_bytes: Most bytes held, >= 1024; a larger value is not kept.
        clock: Seconds that only go forward.

    Raises:
        CacheError: A bound is too small.
    """

    name = "memory"

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
        self._clock = clock
        self._counters = Counters()
        self._entries = TaggedLRU[_Expiring](max_bytes, self._counters, max_entries)

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None."""
        entry = self._entries.get(key)
        if entry is not None and entry.expires_at <= self._clock():
            self._entries.remove(key, entry)
            entry = None
        self._counters.add("misses" if entry is None else "hits")
        return None if entry is None else entry.value

    def set(self, key: str, value: bytes, ttl_seconds: float, tags: Sequence[str] = ()) -> None:
        """Keep ``value`` for ``ttl_seconds``, unless it is larger than the whole tier."""
        entry = _Expiring(value, self._clock() + ttl_seconds)
        self._entries.put(key, entry, len(value) + _ENTRY_OVERHEAD_BYTES, tags)

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were."""
        return self._entries.delete_tags(tags)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, sorted."""
        now = self._clock()
        return sorted(key for key, entry in self._entries.items() if key.startswith(prefix) and entry.expires_at > now)

    def clear(self) -> int:
        """Delete every entry; return how many there were."""
        return self._entries.clear()

    def stats(self) -> TierStats:
        """Return what the tier has done and holds."""
        return self._entries.stats(self.name)

    def close(self) -> None:
        """Delete every entry and keep no other."""
        self._entries.close()


@ANSWER_BACKENDS.register(MemoryCache.name, Locality.PROCESS)
def _open(settings: CacheSettings, _: Path) -> MemoryCache | None:
    return MemoryCache(max_entries=settings.memory_entries) if settings.memory_entries else None
