"""Runs an operation in another thread and stops waiting for it at a deadline, which may follow the latency.

A socket timeout limits each read, not a whole operation. A slow name server, a handshake of several round trips, or a
server that sends one byte at a time take longer. A caller can stop waiting for a thread instead.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_JOIN_SECONDS = 0.2


class DeadlineRunner:
    """A few threads for operations that may hang. They are daemons, so that a hanging one cannot keep a process alive.

    Args:
        name: Prefix of the threads' names.
        max_threads: Most operations at once, hanging ones included; further ones wait until a thread is free.
    """

    def __init__(self, name: str, max_threads: int = 4) -> None:
        self._name = name
        self._max_threads = max_threads
        self._lock = threading.Lock()
        self._closed = False
        self._reset()

    def run(self, operation: Callable[[], _T], seconds: float) -> _T:
        """Return what ``operation`` returns.

        Raises:
            TimeoutError: It did not finish within ``seconds``. It continues in its thread and its result is discarded;
                if it has not begun, it never will.
        """
        future = self.start(operation)
        try:
            return future.result(min(seconds, threading.TIMEOUT_MAX))  # more is an OverflowError
        finally:
            future.cancel()

    def start(self, operation: Callable[[], _T]) -> Future[_T]:
        """Run ``operation`` without waiting for it."""
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._pid != os.getpid():  # threads do not survive a fork
                self._reset()
            self._tasks.put((future, operation))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._max_threads:
                self._start_thread()
        return future

    @property
    def running(self) -> int:
        """How many operations are running, including those past their deadline."""
        with self._lock:
            return self._running

    @property
    def is_full(self) -> bool:
        """Whether all threads are running an operation: another one would wait."""
        return self.running >= self._max_threads

    def close(self) -> None:
        """End the threads that are not hanging."""
        with self._lock:
            self._closed = True
            threads = self._threads if self._pid == os.getpid() else []
            for _ in threads:
                self._tasks.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._running = 0

    def _start_thread(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, args=(self._tasks, self._idle), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(
        self,
        tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None],
        idle: threading.Semaphore,
    ) -> None:
        while (task := tasks.get()) is not None:
            future, operation = task
            if future.set_running_or_notify_cancel():
                self._add_running(1)
                try:
                    result = operation()
                except BaseException as error:
                    self._add_running(-1)
                    future.set_exception(error)
                else:
                    self._add_running(-1)
                    future.set_result(result)
                    del result
            del task, future, operation  # a result must not stay in memory until the next task
            if tasks.empty():  # otherwise the next task was already counted on this thread
                idle.release()

    def _add_running(self, count: int) -> None:
        with self._lock:
            self._running += count


class AdaptiveDeadline:
    """How long to wait for a store, between two limits; longer where the store, the network or this machine is busy.

    Formula: the retransmission timeout of TCP (RFC 6298, section 2): smoothed latency + 4 x smoothed deviation, with
    weights 1/8 and 1/4, and at least twice the smoothed latency: the deviation of a constant latency goes to 0, and
    the next answer that is a little late would miss its deadline. A store that never answers gives no latency, so that
    the deadline for a dead store stays where it is.

    Attributes:
        usable_seconds: Latency up to which waiting for the store is worth it: 3/4 of ``longest_seconds``.
    """

    def __init__(self, shortest_seconds: float, longest_seconds: float) -> None:
        self._shortest = shortest_seconds
        self._longest = longest_seconds
        self.usable_seconds = 0.75 * longest_seconds
        self._lock = threading.Lock()
        self._latency: float | None = None
        self._deviation = 0.0

    @property
    def seconds(self) -> float:
        with self._lock:
            timeout = 0.0 if self._latency is None else self._latency + max(4 * self._deviation, self._latency)
        return min(max(timeout, self._shortest), self._longest)

    def record(self, latency_seconds: float) -> None:
        """Take the latency of an operation that succeeded, in time or late."""
        with self._lock:
            if self._latency is None:
                self._latency, self._deviation = latency_seconds, latency_seconds / 2
                return
            self._deviation += (abs(self._latency - latency_seconds) - self._deviation) / 4
            self._latency += (latency_seconds - self._latency) / 8
