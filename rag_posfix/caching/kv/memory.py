"""The memory tier of the passage KV store: the tensors themselves; the least recently used entry goes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rag_posfix.caching.backends import Locality
from rag_posfix.caching.kv.entry import EntryShape, PassageKV
from rag_posfix.caching.kv.tier import KV_BACKENDS, PassageStoreOptions
from rag_posfix.caching.tagged_lru import TaggedLRU
from rag_posfix.caching.tier import Counters, TierStats
from rag_posfix.errors import CacheError

_ENTRY_OVERHEAD_BYTES = 1024  # the key, the tags and the Python objects around a tensor, roughly


class MemoryPassages:
    """Keeps entries in this process, on the device where they are.

    Args:
        max_bytes: Most bytes held, >= 4096; a larger entry is not kept.

    Raises:
        CacheError: ``max_bytes`` is too small.
    """

    name = "memory"
    immediate = True  # only a reference is kept

    def __init__(self, max_bytes: int = 1024**3) -> None:
        if max_bytes < 4096:
            raise CacheError(
                f"passages in memory: max_bytes={max_bytes} must be >= 4096, or 0 in the settings to have no such tier"
            )
        self._counters = Counters()
        self._entries = TaggedLRU[PassageKV](max_bytes, self._counters)

    def get_many(self, keys: Mapping[str, EntryShape]) -> dict[str, PassageKV]:
        """Return the entries of those of ``keys`` that are held; one of another shape or dtype is removed."""
        found: dict[str, PassageKV] = {}
        for key, expected in keys.items():
            entry = self._entries.get(key)
            if entry is None:
                continue
            if entry.shape == expected:
                found[key] = entry
            else:
                self._entries.remove(key, entry)
                self._counters.add("corrupt")
        self._counters.add("hits", len(found))
        self._counters.add("misses", len(keys) - len(found))
        return found

    def put_many(self, entries: Mapping[str, PassageKV]) -> None:
        """Keep ``entries``, except one that is larger than the whole tier."""
        for key, entry in entries.items():
            self._entries.put(key, entry, entry.n_bytes + _ENTRY_OVERHEAD_BYTES, entry.tags)

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were."""
        return self._entries.delete_tags(tags)

    def clear(self) -> int:
        """Delete every entry; return how many there were."""
        return self._entries.clear()

    def tags(self) -> frozenset[str]:
        """Return the tags of all entries."""
        return self._entries.tags()

    def stats(self) -> TierStats:
        """Return what the tier has done and holds."""
        return self._entries.stats(self.name)

    def close(self) -> None:
        """Delete every entry and keep no other."""
        self._entries.close()


@KV_BACKENDS.register(MemoryPassages.name, Locality.PROCESS)
def _open(settings: PassageStoreOptions, _: Path) -> MemoryPassages | None:
    return MemoryPassages(settings.memory_bytes) if settings.memory_bytes else None
