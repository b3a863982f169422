"""What a router has sent where in the last seconds: a replica's next sketch will have it, and is not there yet."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

_MOST_MARKS = 16384


class RecentRoutes:
    """The marks that were sent to each replica, forgotten after some seconds. Safe to use from any thread.

    Args:
        seconds: How long a mark is remembered: a few periods of the sketches.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sent: defaultdict[str, dict[int, float]] = defaultdict(dict)  # by replica: when each was sent last
        self._lock = threading.Lock()

    def add(self, replica: str, marks: Iterable[int], now: float) -> None:
        """Note that a question with ``marks`` was sent to ``replica`` at ``now``."""
        with self._lock:
            sent = self._sent[replica]
            for mark in marks:
                sent.pop(mark, None)
                sent[mark] = now
            while len(sent) > _MOST_MARKS:
                del sent[next(iter(sent))]

    def marks(self, replica: str, now: float) -> frozenset[int]:
        """Return what was sent to ``replica`` within the last seconds before ``now``."""
        with self._lock:
            sent = self._sent.get(replica, {})
            for mark in [mark for mark, at in sent.items() if now - at > self._seconds]:
                del sent[mark]
            return frozenset(sent)

    def keep_only(self, replicas: Iterable[str]) -> None:
        """Forget what was sent to replicas that are no more."""
        alive = set(replicas)
        with self._lock:
            for gone in set(self._sent) - alive:
                del self._sent[gone]
