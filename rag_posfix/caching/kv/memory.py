"""The tier in memory: the tensors themselves, least recently used ones go first, bounded by their bytes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rag_posfix.caching.kv.entry import EntryShape, PassageKV
from rag_posfix.caching.tagged_lru import TaggedLRU
from rag_posfix.caching.tier import Counters, TierStats
from rag_posfix.errors import CacheError

__all__ = ["MemoryPassages"]

_ENTRY_OVERHEAD_BYTES = 1024  # the key, the tags and the objects around a tensor, roughly


@dataclass(frozen=True, slots=True)
class _Kept:
    entry: PassageKV

    @property
    def size(self) -> int:
        return self.entry.n_bytes + _ENTRY_OVERHEAD_BYTES

    @property
    def tags(self) -> tuple[str, ...]:
        return self.entry.tags


class MemoryPassages:
    """Keeps entries in this process, on the device where they are.

    Args:
        max_bytes: Most bytes held, >= 4096; a larger entry is not kept.

    Raises:
        CacheError: ``max_bytes`` is too small.
    """

    def __init__(self, max_bytes: int = 1024**3) -> None:
        if max_bytes < 4096:
            raise CacheError(
                f"passages in memory: max_bytes={max_bytes} must be >= 4096, or 0 in the settings to have no such tier"
            )
        self._max_bytes = max_bytes
        self._entries = TaggedLRU[_Kept](max_bytes)
        self._counters = Counters()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        """``memory``."""
        return "memory"

    @property
    def immediate(self) -> bool:
        """True: an entry is kept by remembering where it is."""
        return True

    def get_many(self, keys: Mapping[str, EntryShape]) -> dict[str, PassageKV]:
        """Return those of ``keys`` that are held and are as expected; another one is dropped."""
        found: dict[str, PassageKV] = {}
        with self._lock:
            for key, expected in keys.items():
                kept = self._entries.get(key)
                if kept is None:
                    continue
                if kept.entry.shape == expected:
                    found[key] = kept.entry
                else:
                    del self._entries[key]
                    self._counters.add("corrupt")
        self._counters.add("hits", len(found))
        self._counters.add("misses", len(keys) - len(found))
        return found

    def put_many(self, entries: Mapping[str, PassageKV]) -> None:
        """Keep ``entries``, except one that is larger than the whole tier."""
        with self._lock:
            for key, entry in entries.items():
                kept = _Kept(entry)
                if self._closed or kept.size > self._max_bytes:
                    self._entries.pop(key, None)
                else:
                    self._entries.add(key, kept)

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Drop every entry with one of ``tags``; return how many there were."""
        with self._lock:
            keys = {key for tag in tags for key in self._entries.by_tag.get(tag, ())}
            for key in keys:
                del self._entries[key]
        return len(keys)

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
            corrupt=self._counters["corrupt"],
            evictions=evictions,
            entries=entries,
            bytes=size,
        )

    def close(self) -> None:
        """Drop every entry and keep no other."""
        with self._lock:
            self._closed = True
        self.clear()
