"""Calls to stores that may fail: a failure is counted, logged once and replaced by a default, never raised."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from rag_posfix.errors import CacheError

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class Counters:
    """Named counts that several threads may add to."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]


class CircuitBreaker:
    """Decides whether a store may be used.

    Closed: every caller may use the store. A failure opens the breaker: no caller may use the store until the end of
    the cool-down. Then it is half-open: one caller at a time may try. A success closes it; another failure doubles the
    cool-down, up to ``max_cooldown_seconds``.
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
        with self._lock:
            return self._retry_at is None

    def allow(self) -> bool:
        """Return whether the caller may use the store now; it must then report ``success`` or ``failure``."""
        with self._lock:
            if self._retry_at is None:
                return True
            current_time = self._clock()
            if current_time < self._retry_at:
                return False
            # The trial is a lease: if its caller never reports, another one follows after a cool-down.
            self._retry_at = current_time + self._cooldown
            self._trying = True
            return True

    def success(self) -> None:
        with self._lock:
            self._retry_at = None
            self._trying = False
            self._cooldown = self._first_cooldown

    def failure(self) -> None:
        with self._lock:
            if self._retry_at is None:
                self._cooldown = self._first_cooldown
            elif self._trying:
                self._cooldown = min(2 * self._cooldown, self._max_cooldown)
            else:  # the call began before the first failure was reported: the same outage, not a longer one
                return
            self._trying = False
            self._retry_at = self._clock() + self._cooldown


class Guard:
    """Calls a store, skips it while its circuit breaker is open, and logs the start and the end of an outage.

    Each use of the store ("reading redis://host:6379/0") has its own line in the log: a full store rejects every write
    and serves every read, and a shared state would log a line for each request.

    Args:
        cache: The cache that the store belongs to, for the log.
        counters: Counts failures as ``errors`` and skipped reads as ``skipped``.
        breaker: None never skips the store.
        errors: Exceptions that mean that the store failed; others are raised.
        is_rejection: Whether a failure means that the store works and rejects this operation, for example because it
            is full or read-only. The breaker then stays closed.
    """

    def __init__(
        self,
        cache: str,
        counters: Counters | None = None,
        breaker: CircuitBreaker | None = None,
        errors: tuple[type[Exception], ...] = (Exception,),
        is_rejection: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        self._cache = cache
        self._counters = counters or Counters()
        self._breaker = breaker
        self._errors = errors
        self._is_rejection = is_rejection
        self._failing: set[str] = set()
        self._lock = threading.Lock()

    def call(self, use: str, operation: Callable[[], _T], default: _T, *, ignore_breaker: bool = False) -> _T:
        """Return what ``operation`` returns, or ``default`` if it fails or the circuit breaker is open."""
        if self._breaker is not None and not (self._breaker.allow() or ignore_breaker):
            self._counters.add("skipped" if use.startswith("reading") else "skipped_writes")
            return default
        try:
            result = operation()
        except self._errors as error:
            self.failed(use, error)
            if self._breaker is not None:
                (self._breaker.success if self._is_rejection(error) else self._breaker.failure)()
            return default
        if self._breaker is not None:
            self._breaker.success()
        self.worked(use)
        return result

    def failed(self, use: str, error: BaseException) -> None:
        """Report a failure. Only the type of the error is logged, because its text may quote stored values."""
        self._counters.add("errors")
        with self._lock:
            is_new = use not in self._failing
            self._failing.add(use)
        if is_new:
            _logger.warning("%s: %s is failing (%s); answering without it", self._cache, use, type(error).__name__)

    def worked(self, use: str) -> None:
        """Report a success."""
        with self._lock:
            was_failing = use in self._failing
            self._failing.discard(use)
        if was_failing:
            _logger.warning("%s: %s works again", self._cache, use)
