"""How long a reranking may take, told to the reranker beside the call: it looks between two batches.

A thread cannot be stopped from outside. What computes in steps asks here before each of them, so that a ranking that
nobody waits for any more lets go of the model within one step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from rag_posfix.errors import RerankingTimeoutError

__all__ = ["Watch", "check_time", "in_thread", "watched"]

T = TypeVar("T")


@dataclass(slots=True)
class Watch:
    """One reason to stop.

    Attributes:
        until: When the time is over, on the monotonic clock; None for never.
        cancelled: Whether nobody waits any more.
    """

    until: float | None = None
    cancelled: bool = False


_WATCHES: ContextVar[tuple[Watch, ...]] = ContextVar("rag_posfix_reranking_watches", default=())


@contextmanager
def watched(seconds: float | None) -> Iterator[Watch]:
    """Run what is inside under a watch, besides those that are set already. Threads get it with their context."""
    watch = Watch(None if seconds is None else time.monotonic() + seconds)
    token = _WATCHES.set((*_WATCHES.get(), watch))
    try:
        yield watch
    finally:
        _WATCHES.reset(token)


def check_time() -> None:
    """Return if there is reason to go on.

    Raises:
        RerankingTimeoutError: the time is over, or nobody waits any more.
    """
    for watch in _WATCHES.get():
        if watch.cancelled:
            raise RerankingTimeoutError("nobody waits for this reranking any more; it was stopped between two steps")
        if watch.until is not None and time.monotonic() > watch.until:
            raise RerankingTimeoutError(
                "the reranking took longer than its deadline and was stopped between two steps"
            )


async def in_thread(function: Callable[[], T]) -> T:
    """Return what ``function`` returns, run in a worker thread; cancelled, it stops at its next ``check_time``."""
    with watched(None) as watch:
        try:
            return await asyncio.to_thread(function)
        except asyncio.CancelledError:
            watch.cancelled = True
            raise
