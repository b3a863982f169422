"""Whether the running call is still wanted, in a ``ContextVar``: long work and waits ask between their steps.

A service ends work whose client has left or whose time is over. Assembly and waits in a cache are below interfaces
that have no argument for that, so they read the check here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("rag_posfix_check_wanted", default=None)


def check_wanted() -> None:
    """Raise what the check of the running call raises if nobody waits for its result; nothing without a check."""
    check = _CHECK.get()
    if check is not None:
        check()


def watch(check: Callable[[], None]) -> None:
    """Set the check of the running context.

    Args:
        check: Raises if the result is not wanted any more; quick, and safe to call from any thread.
    """
    _CHECK.set(check)
