"""Calls to a store that may fail: a failure is counted, logged once and returned as None, never raised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.health import Health
from rag_posfix.caching.tier import Counters

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StoreFailures:
    """How the failures of one store are recognised and reported.

    Attributes:
        cache: The cache that the store belongs to, for the log.
        counters: Where failures are counted, under ``errors``.
        breaker: The circuit breaker of the store. A failure opens it.
        exceptions: Exceptions that mean that the store failed; others are raised.
        is_refusal: Returns whether a failure means that the store works and refuses this operation alone, for example
            because it is full or read-only. The breaker then stays closed.
    """

    cache: str
    counters: Counters
    breaker: CircuitBreaker
    exceptions: tuple[type[Exception], ...] = (Exception,)
    is_refusal: Callable[[BaseException], bool] = lambda _: False


class StoreAccess:
    """One use of a store, such as reading it.

    Reading and writing have one access each, with the same ``StoreFailures``: a full store refuses every write and
    serves every read, and if both shared one state, the log would have a line for each request.

    Args:
        label: What the log calls this use of the store ("reading redis://host:6379/0"), without a password.
        failures: How its failures are recognised and reported.
        skipped: Where operations are counted that the open breaker does not allow.
    """

    def __init__(self, label: str, failures: StoreFailures, skipped: str = "skipped") -> None:
        self._skipped = skipped
        self._health = Health(label, failures.cache)
        self._failures = failures

    def call(self, operation: Callable[[], _T], *, ignore_breaker: bool = False) -> _T | None:
        """Return what ``operation`` returns, or None if it fails or the circuit breaker is open.

        Args:
            ignore_breaker: Ask the store even while the breaker is open.
        """
        breaker = self._failures.breaker
        if not (breaker.allow() or ignore_breaker):
            self._failures.counters.add(self._skipped)
            return None
        try:
            result = operation()
        except self._failures.exceptions as error:
            self._failures.counters.add("errors")
            self._health.failed(error)
            if self._failures.is_refusal(error):
                breaker.success()
            else:
                breaker.failure()
            return None
        breaker.success()
        self._health.worked()
        return result
