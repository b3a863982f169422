"""Computes an answer once if several threads of a process request it at the same time: the others wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rag_posfix.errors import CacheError

__all__ = ["SingleFlight"]


class _KeyLock:
    """The lock of one key, and how many threads hold it or wait for it."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


class SingleFlight:
    """Lets one thread at a time work on a key. Its length is the number of keys that are held.

    Args:
        max_wait_seconds: Longest wait for another thread, >= 0. Afterwards the work is done twice: a computation that
            hangs must not block equal requests for ever.

    Raises:
        CacheError: ``max_wait_seconds`` is negative.
    """

    def __init__(self, max_wait_seconds: float = 60.0) -> None:
        if max_wait_seconds < 0:
            raise CacheError(f"single flight: max_wait_seconds={max_wait_seconds} must be >= 0")
        self._max_wait = max_wait_seconds
        self._locks: dict[str, _KeyLock] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._locks)

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Hold ``key`` while working on it; wait first if another thread holds it."""
        with self._lock:
            key_lock = self._locks.setdefault(key, _KeyLock())
            key_lock.users += 1
        acquired = False
        try:
            acquired = key_lock.lock.acquire(timeout=self._max_wait)
            yield
        finally:
            if acquired:
                key_lock.lock.release()
            with self._lock:
                key_lock.users -= 1
                if not key_lock.users:
                    del self._locks[key]
