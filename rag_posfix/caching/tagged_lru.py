"""A least-recently-used cache bounded by bytes, whose entries can be found by tag."""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol, TypeVar

from cachetools import LRUCache

__all__ = ["TaggedEntry", "TaggedLRU"]


class TaggedEntry(Protocol):
    """What is kept: it knows its size and what it can be dropped by."""

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """What it can be dropped by."""
        ...


_Entry = TypeVar("_Entry", bound=TaggedEntry)


class TaggedLRU(LRUCache[str, _Entry]):
    """An LRU whose every removal, evictions included, also leaves the index of tags. Not for several threads at once.

    Args:
        max_bytes: Most bytes held; ``add`` of a larger entry is an error.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, getsizeof=lambda entry: entry.size)
        self.by_tag: defaultdict[str, set[str]] = defaultdict(set)
        self.evictions = 0

    def add(self, key: str, entry: _Entry, max_entries: int | None = None) -> None:
        """Keep ``entry`` in place of what ``key`` had; others go where there is no room."""
        self.pop(key, None)
        while max_entries is not None and len(self) >= max_entries:
            self.popitem()
        self[key] = entry
        for tag in entry.tags:
            self.by_tag[tag].add(key)

    def popitem(self) -> tuple[str, _Entry]:
        """Remove and return the least recently used entry."""
        self.evictions += 1
        return super().popitem()

    def __delitem__(self, key: str) -> None:
        tags = self[key].tags
        super().__delitem__(key)
        for tag in tags:
            keys = self.by_tag[tag]
            keys.discard(key)
            if not keys:
                del self.by_tag[tag]

    def clear(self) -> None:
        """Remove every entry."""
        super().clear()
        self.by_tag.clear()
