"""Failures of rerankers by name: how many by reason, and how many in a row since when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

FAILING_AFTER = 3
"""Failures in a row after which a reranker counts as failing."""


@dataclass(frozen=True, slots=True)
class RerankerFailures:
    """The failures of one reranker.

    Attributes:
        counts: Failures by reason: ``error`` and ``timeout``.
        in_a_row: Failures since the last success.
        since: Unix time of the first of these; 0 without one.
        last_error: Class name of the last error.
    """

    counts: dict[str, int] = field(default_factory=lambda: {"error": 0, "timeout": 0})
    in_a_row: int = 0
    since: float = 0.0
    last_error: str = ""


class RerankerHealth:
    """The failures of rerankers by name. Safe to share between threads.

    Args:
        clock: Returns the Unix time.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[str, RerankerFailures] = {}

    def failures(self) -> dict[str, RerankerFailures]:
        """Return the failures of each reranker that was called."""
        with self._lock:
            return dict(self._failures)

    def count_success(self, name: str) -> None:
        """End the row of failures of a reranker."""
        with self._lock:
            self._failures[name] = RerankerFailures(self._failures.get(name, RerankerFailures()).counts)

    def count_failure(self, name: str, error: Exception, reason: str) -> None:
        """Count a failure: ``reason`` is ``error`` or ``timeout``."""
        with self._lock:
            before = self._failures.get(name, RerankerFailures())
            self._failures[name] = replace(
                before,
                counts={**before.counts, reason: before.counts[reason] + 1},
                in_a_row=before.in_a_row + 1,
                since=before.since if before.in_a_row else self._clock(),
                last_error=type(error).__name__,
            )

    def describe_failing(self) -> str | None:
        """Return which rerankers failed ``FAILING_AFTER`` times in a row or more, and since when; None without one."""
        lines = [
            f"reranker {name} failed {failures.in_a_row} times in a row since "
            f"{datetime.fromtimestamp(failures.since, UTC):%Y-%m-%dT%H:%M:%SZ} ({failures.last_error})"
            for name, failures in sorted(self.failures().items())
            if failures.in_a_row >= FAILING_AFTER
        ]
        return "; ".join(lines) + "; documents keep their order" if lines else None
