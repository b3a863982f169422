"""Equal work at the same time in one process is done once: the others wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rag_posfix.errors import CacheError

__all__ = ["SingleFlight"]


class _Flight:
    """One key that somebody holds or waits for."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


class SingleFlight:
    """Lets one thread at a time work on a key.

    Args:
        max_wait_seconds: Longest wait for another thread. Afterwards the work is done twice: a hanging computation
            must not stop its equals for ever.
    """

    def __init__(self, max_wait_seconds: float = 60.0) -> None:
        if max_wait_seconds < 0:
            raise CacheError(f"single flight: max_wait_seconds={max_wait_seconds} must be >= 0")
        self._max_wait = max_wait_seconds
        self._flights: dict[str, _Flight] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._flights)

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Hold ``key`` while working on it; wait first if another thread holds it."""
        with self._lock:
            flight = self._flights.setdefault(key, _Flight())
            flight.users += 1
        acquired = False
        try:
            acquired = flight.lock.acquire(timeout=self._max_wait)
            yield
        finally:
            if acquired:
                flight.lock.release()
            with self._lock:
                flight.users -= 1
                if not flight.users:
                    del self._flights[key]
