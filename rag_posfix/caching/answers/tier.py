"""The interface of a tier of the answer cache: bytes under keys, with a time to live and tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rag_posfix.caching.backends import Backends
from rag_posfix.caching.tier import Tier
from rag_posfix.settings import CacheSettings

ANSWER_CACHE = "answer cache"
"""What the log and errors call it."""


@runtime_checkable
class ByteCache(Tier, Protocol):
    """A tier that stores bytes."""

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None."""
        ...

    def set(self, key: str, value: bytes, ttl_seconds: float, tags: Sequence[str] = ()) -> None:
        """Keep ``value`` for ``ttl_seconds``; it can be deleted by each of ``tags``."""
        ...


@runtime_checkable
class ListedCache(ByteCache, Protocol):
    """A tier that can list its keys. Those in memory and on disk can."""

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, sorted."""
        ...


ANSWER_BACKENDS: Backends[CacheSettings, ByteCache] = Backends(ANSWER_CACHE)
