"""Whose work runs: what is kept of passages is shared within a salt only. Carried beside the call, thread by thread.

A reranker is called with documents and a question alone (langchain's interface); one that keeps keys and values of
passages reads here under which salt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["current_salt", "salted"]

_SALT: ContextVar[str] = ContextVar("rag_posfix_salt", default="")


def current_salt() -> str:
    """Return the salt of what runs now; "" where nobody said one."""
    return _SALT.get()


@contextmanager
def salted(salt: str) -> Iterator[None]:
    """Run what is inside under ``salt``."""
    token = _SALT.set(salt)
    try:
        yield
    finally:
        _SALT.reset(token)
