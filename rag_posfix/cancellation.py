"""Ends work for a request that was cancelled or timed out: long work and waits call ``check_cancelled`` between steps.

Assembly and waits in a cache are below interfaces that have no argument for the check: it is in a ``ContextVar``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from math import inf

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
