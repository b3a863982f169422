"""Writes entries behind the answer: one background thread and a queue that is bounded by bytes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from rag_posfix.caching.kv.entry import PassageKV

__all__ = ["WriteBehind"]

_BATCH_BYTES = 32 * 1024**2
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Write:
    key: str
    entry: PassageKV
    below: int


class WriteBehind:
    """Hands entries to ``write``, in their order, in a daemon thread that starts with the first of them.

    Args:
        write: Writes entries into every tier of which the place is below the number; must not raise.
        max_bytes: Most bytes of entries that wait. One that would exceed it is not written, unless none waits.
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
        """Most bytes of entries that wait."""
        return self._max_bytes

    @property
    def pending(self) -> int:
        """Entries that wait or are being written."""
        with self._changed:
            return len(self._waiting) + self._writing

    def add(self, entries: Mapping[str, PassageKV], below: int) -> int:
        """Write ``entries`` soon; return how many did not fit and will not be written. Never waits for a write."""
        refused = 0
        with self._changed:
            for key, entry in entries.items():
                full = bool(self._waiting) and self._waiting_bytes + entry.n_bytes > self._max_bytes
                if full or self._closed:
                    refused += 1
                    continue
                self._waiting.append(_Write(key, entry, below))
                self._waiting_bytes += entry.n_bytes
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rag-posfix-passages", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return refused

    def forget(self, tags: Collection[str] | None = None) -> None:
        """Do not write what waits and has one of ``tags`` (None: anything), and wait for the write under way."""
        with self._changed:
            unwanted = None if tags is None else set(tags)
            kept = [w for w in self._waiting if unwanted is not None and unwanted.isdisjoint(w.entry.tags)]
            self._waiting = deque(kept)
            self._waiting_bytes = sum(write.entry.n_bytes for write in kept)
            self._changed.notify_all()
            # A hanging disk must not hang the caller as well.
            self._changed.wait_for(lambda: not self._writing, _PATIENCE_SECONDS)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything is written; return whether it was within ``timeout_seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Write what waits, for ``timeout_seconds`` at most, and end the thread."""
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
            entries, below = batch
            try:
                self._write(entries, below)
            finally:
                del batch, entries  # do not keep tensors alive until the next write
                with self._changed:
                    self._writing = 0
                    self._changed.notify_all()

    def _next(self) -> tuple[dict[str, PassageKV], int] | None:
        """Wait for entries and return the first ones that go to the same tiers, or None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            below, taken, entries = self._waiting[0].below, 0, dict[str, PassageKV]()
            while self._waiting and self._waiting[0].below == below and taken < _BATCH_BYTES:
                write = self._waiting.popleft()
                entries[write.key] = write.entry
                taken += write.entry.n_bytes
            self._waiting_bytes -= taken
            self._writing = len(entries)
            return entries, below
