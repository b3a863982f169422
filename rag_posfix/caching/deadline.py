"""Runs an operation in another thread and stops waiting for it at a deadline.

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
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._pid != os.getpid():  # threads do not survive a fork
                self._reset()
            self._tasks.put((future, operation))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._max_threads:
                self._start_thread()
        try:
            return future.result(seconds)
        finally:
            future.cancel()

    @property
    def running(self) -> int:
        """How many operations are running, including those that nobody waits for any more."""
        with self._lock:
            return self._running

    def close(self) -> None:
        """End the threads that are not hanging."""
        with self._lock:
            self._closed = True
            threads = self._threads if self._pid == os.getpid() else []
            for _ in threads:
                self._tasks.put(None)
        for thread in threads:
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
                self._run_one(future, operation)
            del task, future, operation  # a result must not stay in memory until the next task
            if tasks.empty():  # otherwise the next task was already counted on this thread
                idle.release()

    def _run_one(self, future: Future[Any], operation: Callable[[], Any]) -> None:
        with self._lock:
            self._running += 1
        try:
            result = operation()
        except BaseException as error:
            self._finished()
            future.set_exception(error)
        else:
            self._finished()
            future.set_result(result)

    def _finished(self) -> None:
        with self._lock:
            self._running -= 1
