"""The salt of the cache keys of the running call, in a ``ContextVar``: keys and values are shared within a salt only.

langchain's interface calls a reranker with documents and a question only. A reranker that caches keys and values reads
the salt here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

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


def own_tags(salt: str, tags: Sequence[str]) -> tuple[str, ...]:
    """Return the tags by which one tenant drops its entries alone: no other salt gives the same ones.

    An empty salt has no tenant tags. ``tags`` drop entries over all salts.
    """
    if not salt:
        return ()
    return tuple(hashlib.blake2b(repr((salt, tag)).encode(), digest_size=16).hexdigest() for tag in tags)
