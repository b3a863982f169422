"""Deadlines and cancellation of rerankings: a reranker checks between two steps whether it may go on.

A thread cannot be stopped from outside. A reranker that computes in steps calls ``check_deadline`` before each of
them, so that it releases the model within one step after its deadline or its cancellation. Deadlines are passed
through a context variable, because langchain's interface has no argument for them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from rag_posfix.errors import RerankingTimeoutError

T = TypeVar("T")


class Deadline:
    """A point in time after which a reranking must stop. It can also be cancelled, from any thread.

    Args:
        seconds: Time left; None for no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop the reranking at its next step."""
        self._cancelled.set()

    def check(self) -> None:
        """Return if the reranking may go on.

        Raises:
            RerankingTimeoutError: it was cancelled, or its time is over.
        """
        if self._cancelled.is_set():
            raise RerankingTimeoutError("the reranking was cancelled and stopped between two steps")
        if self._until is not None and time.monotonic() > self._until:
            raise RerankingTimeoutError(
                "the reranking took longer than its deadline and was stopped between two steps"
            )


_DEADLINES: ContextVar[tuple[Deadline, ...]] = ContextVar("rag_posfix_reranking_deadlines", default=())


@contextmanager
def deadline(seconds: float | None) -> Iterator[Deadline]:
    """Set a deadline for the code in the ``with`` block, in addition to those that are set already.

    Args:
        seconds: Time left; None for a deadline that can only be cancelled.
    """
    added = Deadline(seconds)
    token = _DEADLINES.set((*_DEADLINES.get(), added))
    try:
        yield added
    finally:
        _DEADLINES.reset(token)


def check_deadline() -> None:
    """Return if the current reranking may go on.

    Raises:
        RerankingTimeoutError: it was cancelled, or its time is over.
    """
    for one in _DEADLINES.get():
        one.check()


async def run_in_thread(function: Callable[[], T]) -> T:
    """Return the result of ``function``, run in a worker thread; cancelled, it stops at its next ``check_deadline``.

    Args:
        function: Runs with a copy of the current context.
    """
    with deadline(None) as cancellation:
        try:
            return await asyncio.to_thread(function)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise
