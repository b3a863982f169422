"""Computes an answer once if several threads of a process request it at the same time: the others wait."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rag_posfix.cancellation import check_cancelled
from rag_posfix.errors import CacheError

_CHECK_SECONDS: Final = 0.05
"""How often a waiting thread asks whether it is still wanted."""
_REMEMBERED: Final = 1024
_RECENT_SECONDS: Final = 10.0


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
        self._released: OrderedDict[str, float] = OrderedDict()  # when work on a key ended, the latest last
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._locks)

    @contextmanager
    def hold(self, key: str) -> Iterator[bool]:
        """Hold ``key`` while working on it; wait first if another thread holds it.

        The value is whether another thread may have done the work a moment ago: its result is worth looking up.
        A wait ends early with the error of ``rag_posfix.cancellation.check_cancelled``.
        """
        with self._lock:
            key_lock = self._locks.setdefault(key, _KeyLock())
            key_lock.users += 1
        acquired = False
        try:
            acquired = key_lock.lock.acquire(blocking=False) or self._wait(key_lock.lock)
            yield self._was_released(key)
        finally:
            with self._lock:
                if acquired:
                    key_lock.lock.release()
                    self._remember(key)
                key_lock.users -= 1
                if not key_lock.users:
                    del self._locks[key]

    def _wait(self, lock: threading.Lock) -> bool:
        """Return whether the lock was acquired within the longest wait."""
        end = time.monotonic() + self._max_wait
        while (left := end - time.monotonic()) > 0:
            check_cancelled()
            if lock.acquire(timeout=min(left, _CHECK_SECONDS)):
                return True
        return False

    def _was_released(self, key: str) -> bool:
        with self._lock:
            return time.monotonic() - self._released.get(key, -_RECENT_SECONDS) < _RECENT_SECONDS

    def _remember(self, key: str) -> None:
        self._released[key] = time.monotonic()
        self._released.move_to_end(key)
        if len(self._released) > _REMEMBERED:
            self._released.popitem(last=False)
