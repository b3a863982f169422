"""A circuit breaker: after a failure a store is left alone for a while, then tried by one caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rag_posfix.errors import CacheError

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Says whether a store may be asked.

    Closed: everybody may. A failure opens it: nobody may until the cool-down is over. Then one caller at a time may
    try (half-open): success closes it, another failure doubles the cool-down.

    Args:
        cooldown_seconds: Rest after the first failure, > 0.
        max_cooldown_seconds: Longest rest.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        cooldown_seconds: float = 5.0,
        max_cooldown_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < cooldown_seconds <= max_cooldown_seconds:
            raise CacheError(
                f"circuit breaker: cooldown_seconds={cooldown_seconds} must be above 0 and at most "
                f"max_cooldown_seconds={max_cooldown_seconds}"
            )
        self._first_cooldown = cooldown_seconds
        self._max_cooldown = max_cooldown_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._cooldown = cooldown_seconds
        self._retry_at: float | None = None  # None: closed
        self._trying = False

    @property
    def closed(self) -> bool:
        """Whether the store is believed to work."""
        with self._lock:
            return self._retry_at is None

    def allow(self) -> bool:
        """Return whether the caller may ask the store now; it must then report ``success`` or ``failure``."""
        with self._lock:
            if self._retry_at is None:
                return True
            now = self._clock()
            if now < self._retry_at:
                return False
            # The trial is a lease: if its caller never reports, another one follows after a cool-down.
            self._retry_at = now + self._cooldown
            self._trying = True
            return True

    def success(self) -> None:
        """The store answered: everybody may ask again."""
        with self._lock:
            self._retry_at = None
            self._trying = False
            self._cooldown = self._first_cooldown

    def failure(self) -> None:
        """The store failed: give it a rest, a longer one if it was resting already."""
        with self._lock:
            if self._retry_at is None:
                self._cooldown = self._first_cooldown
            elif self._trying:
                self._cooldown = min(2 * self._cooldown, self._max_cooldown)
            else:  # asked before the first failure was known: the same outage, not a longer one
                return
            self._trying = False
            self._retry_at = self._clock() + self._cooldown
