"""Circuit breaker: after a failure a store is not used for a while, and then tried by one caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rag_posfix.errors import CacheError


class CircuitBreaker:
    """Decides whether a store may be used.

    Closed: every caller may use the store. A failure opens the breaker: no caller may use the store until the end of
    the cool-down. Then it is half-open: one caller at a time may try. A success closes it; another failure doubles the
    cool-down.

    Args:
        cooldown_seconds: Cool-down after the first failure, > 0.
        max_cooldown_seconds: Longest cool-down.
        clock: Monotonic clock in seconds.
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
        """Whether the breaker is closed."""
        with self._lock:
            return self._retry_at is None

    def allow(self) -> bool:
        """Return whether the caller may use the store now; it must then report ``success`` or ``failure``."""
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
        """Report a success, which closes the breaker."""
        with self._lock:
            self._retry_at = None
            self._trying = False
            self._cooldown = self._first_cooldown

    def failure(self) -> None:
        """Report a failure, which opens the breaker; a failed trial doubles the cool-down."""
        with self._lock:
            if self._retry_at is None:
                self._cooldown = self._first_cooldown
            elif self._trying:
                self._cooldown = min(2 * self._cooldown, self._max_cooldown)
            else:  # asked before the first failure was known: the same outage, not a longer one
                return
            self._trying = False
            self._retry_at = self._clock() + self._cooldown
