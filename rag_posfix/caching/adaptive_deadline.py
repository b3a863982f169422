"""A deadline that follows the measured latency of a store, within bounds."""

from __future__ import annotations

import threading


class AdaptiveDeadline:
    """How long to wait for a store. It grows where the store, the network or this machine is busy.

    Formula: the retransmission timeout of TCP (RFC 6298, section 2): smoothed latency + 4 x smoothed deviation, with
    weights 1/8 and 1/4. A store that never answers gives no latency, so that the deadline for a dead store stays
    where it is.

    Args:
        shortest_seconds: The deadline at the start, and its lower bound.
        longest_seconds: Its upper bound.
    """

    def __init__(self, shortest_seconds: float, longest_seconds: float) -> None:
        self._shortest = shortest_seconds
        self._longest = longest_seconds
        self._lock = threading.Lock()
        self._latency: float | None = None
        self._deviation = 0.0

    @property
    def seconds(self) -> float:
        """The deadline now."""
        with self._lock:
            wanted = 0.0 if self._latency is None else self._latency + 4 * self._deviation
        return min(max(wanted, self._shortest), self._longest)

    def record(self, latency_seconds: float) -> None:
        """Take the latency of an operation that succeeded, in time or late."""
        with self._lock:
            if self._latency is None:
                self._latency, self._deviation = latency_seconds, latency_seconds / 2
                return
            self._deviation += (abs(self._latency - latency_seconds) - self._deviation) / 4
            self._latency += (latency_seconds - self._latency) / 8
