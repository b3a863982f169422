"""Write-behind: a background thread writes entries to slow tiers, from a queue that is bounded by bytes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from rag_posfix.caching.kv.entry import PassageKV

_BATCH_BYTES = 32 * 1024**2
_MAX_WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Write:
    key: str
    entry: PassageKV
    n_tiers: int


class WriteBehind:
    """Calls ``write`` with entries, in their order, in a daemon thread that starts with the first of them.

    Args:
        write: Takes entries and a number n, and writes them to the tiers among the first n that are not
            immediate. It must not raise.
        max_bytes: Most bytes of entries in the queue. An entry that would exceed it is not written, unless the queue
            is empty.
    """

    def __init__(self, write: Callable[[Mapping[str, PassageKV], int], None], max_bytes: int) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._waiting: deque[_Write] = deque()
        self._waiting_bytes = 0
        self._writing = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    @property
    def max_bytes(self) -> int:
        """Most bytes of entries in the queue."""
        return self._max_bytes

    @property
    def pending(self) -> int:
        """Entries in the queue or being written."""
        with self._changed:
            return len(self._waiting) + self._writing

    def add(self, entries: Mapping[str, PassageKV], n_tiers: int) -> int:
        """Queue ``entries`` and return at once.

        Args:
            n_tiers: Passed on to ``write``.

        Returns:
            How many did not fit into the queue and will not be written.
        """
        rejected = 0
        with self._changed:
            for key, entry in entries.items():
                full = bool(self._waiting) and self._waiting_bytes + entry.n_bytes > self._max_bytes
                if full or self._closed:
                    rejected += 1
                    continue
                self._waiting.append(_Write(key, entry, n_tiers))
                self._waiting_bytes += entry.n_bytes
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rag-posfix-passages", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return rejected

    def cancel(self, tags: Collection[str] | None = None) -> None:
        """Remove entries with one of ``tags`` from the queue, all if None, and wait for the write that is running."""
        with self._changed:
            unwanted = None if tags is None else set(tags)
            remaining = [
                write for write in self._waiting if unwanted is not None and unwanted.isdisjoint(write.entry.tags)
            ]
            self._waiting = deque(remaining)
            self._waiting_bytes = sum(write.entry.n_bytes for write in remaining)
            self._changed.notify_all()
            # The wait is bounded: if the disk hangs, the caller must not.
            self._changed.wait_for(lambda: not self._writing, _MAX_WAIT_SECONDS)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything is written; return whether that took at most ``timeout_seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Write the queue, for ``timeout_seconds`` at most, and end the thread."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            self._closed = True
        self.flush(timeout_seconds)
        with self._changed:
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()) + 0.1)

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            entries, n_tiers = batch
            try:
                self._write(entries, n_tiers)
            finally:
                del batch, entries  # tensors must not stay in memory until the next write
                with self._changed:
                    self._writing = 0
                    self._changed.notify_all()

    def _next(self) -> tuple[dict[str, PassageKV], int] | None:
        """Wait for entries and return the first of them that go to the same tiers, or None once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            n_tiers, taken, entries = self._waiting[0].n_tiers, 0, dict[str, PassageKV]()
            while self._waiting and self._waiting[0].n_tiers == n_tiers and taken < _BATCH_BYTES:
                write = self._waiting.popleft()
                entries[write.key] = write.entry
                taken += write.entry.n_bytes
            self._waiting_bytes -= taken
            self._writing = len(entries)
            return entries, n_tiers
