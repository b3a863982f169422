"""The salt of the cache keys of the running call, in a ``ContextVar``: keys and values are shared within a salt only.

langchain's interface calls a reranker with documents and a question only. A reranker that caches keys and values reads
the salt here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["current_salt", "salted"]

_SALT: ContextVar[str] = ContextVar("rag_posfix_salt", default="")


def current_salt() -> str:
    """Return the salt of the running call; "" without one."""
    return _SALT.get()


@contextmanager
def salted(salt: str) -> Iterator[None]:
    """Run the block with the salt ``salt``."""
    token = _SALT.set(salt)
    try:
        yield
    finally:
        _SALT.reset(token)
