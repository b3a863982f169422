"""Ends work for a request that was cancelled or timed out: long work and waits call ``check_cancelled`` between steps.

Assembly and waits in a cache are below interfaces that have no argument for the check: it is in a ``ContextVar``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from math import inf
from typing import TypeVar

from rag_posfix.errors import GenerationCancelled

T = TypeVar("T")

_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("rag_posfix_cancel_check", default=None)
_REMAINING: ContextVar[Callable[[], float]] = ContextVar("rag_posfix_remaining", default=lambda: inf)


def check_cancelled() -> None:
    """Raise if the current request was cancelled or timed out."""
    check = _CHECK.get()
    if check is not None:
        check()


def remaining_seconds() -> float:
    """Return the seconds until the time limit of the current request; infinity without a limit."""
    return _REMAINING.get()()


def set_cancel_check(check: Callable[[], None], remaining: Callable[[], float] = lambda: inf) -> None:
    """Set the check of the running context: quick, callable from any thread; raises if the request has ended.

    ``remaining`` returns the seconds until the time limit of the request.
    """
    _CHECK.set(check)
    _REMAINING.set(remaining)


async def run_until_cancelled(function: Callable[[], T]) -> T:
    """Run a function in another thread; when the task is cancelled, ``check_cancelled`` raises there from then on."""
    cancelled, outer = threading.Event(), _CHECK.get()

    def check() -> None:
        if cancelled.is_set():
            raise GenerationCancelled("the task that waited for the answer was cancelled")
        if outer is not None:
            outer()

    context = copy_context()
    context.run(set_cancel_check, check, _REMAINING.get())
    try:
        return await asyncio.get_running_loop().run_in_executor(None, partial(context.run, function))
    except asyncio.CancelledError:
        cancelled.set()
        raise
