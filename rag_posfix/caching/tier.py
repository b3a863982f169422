"""The interface of all tiers, and their counters and statistics."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Counters:
    """Named counts that several threads may add to."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to the count ``name``."""
        with self._lock:
            self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of a tier since its creation.

    Attributes:
        name: Name of the backend: ``memory``, ``disk``, ``redis``.
        hits: Number of keys that were found.
        misses: Number of keys that were not found. In the answer cache only those that the store was asked for; in
            the passage store for any reason.
        errors: Number of operations that failed.
        skipped: Number of look-ups that were not made, because the circuit breaker was open.
        corrupt: Number of damaged entries; each was a miss.
        evictions: Number of entries that were removed to make room for others.
        entries: Number of entries, or None if counting is expensive.
        bytes: Size of the entries, or None likewise.
        available: False while the tier is failing and its circuit breaker is open.
    """

    name: str
    hits: int = 0
    misses: int = 0
    errors: int = 0
    skipped: int = 0
    corrupt: int = 0
    evictions: int = 0
    entries: int | None = None
    bytes: int | None = None
    available: bool = True

    @classmethod
    def counted(
        cls,
        name: str,
        counters: Counters,
        *,
        entries: int | None = None,
        n_bytes: int | None = None,
        available: bool = True,
    ) -> TierStats:
        """Return the statistics of a tier that counts under the names of the fields above.

        Args:
            available: Whether the tier is used now.
        """
        return cls(
            name,
            hits=counters["hits"],
            misses=counters["misses"],
            errors=counters["errors"],
            skipped=counters["skipped"],
            corrupt=counters["corrupt"],
            evictions=counters["evictions"],
            entries=entries,
            bytes=n_bytes,
            available=available,
        )


class Tier(Protocol):
    """One level of a cache, such as memory or disk. Several threads may use it at once.

    A tier handles its own failures: reading is then a miss, writing does nothing, and both are counted.
    """

    @property
    def name(self) -> str:
        """Name of the backend, for logs and statistics."""
        ...

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were."""
        ...

    def clear(self) -> int:
        """Delete every entry; return how many there were."""
        ...

    def stats(self) -> TierStats:
        """Return what the tier has done and holds."""
        ...

    def close(self) -> None:
        """Release files, sockets and threads. Every later read is a miss and every later write does nothing."""
        ...
