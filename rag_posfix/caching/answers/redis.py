"""The tier in Redis, shared by every replica of a service. Any Redis from version 5 on will do; no modules.

An entry is one string under ``rag_posfix:answer:<key>``, written with one SET that carries its time to live. A tag is
one sorted set under ``rag_posfix:tag:<tag>`` of the keys that have it, scored by when they expire, so that it cleans
itself. Every command names one key, as a cluster wants it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.redis_link import RedisLink
from rag_posfix.caching.redis_tags import add_tags, delete_names, drop_tag, names_of
from rag_posfix.caching.tier import Counters, TierStats, seal, unseal

__all__ = ["RedisCache"]

_ENTRY_PREFIX = "rag_posfix:answer:"
_TAG_PREFIX = "rag_posfix:tag:"


class RedisCache:
    """Keeps entries in Redis.

    Down, slow, full, locked or talking nonsense, Redis costs a request at most ``timeout_seconds``; then the circuit
    breaker leaves it alone, and asks again by itself after a while.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis-cluster://`` or ``redis-sentinel://``.
        timeout_seconds: Bound of one operation, connecting included, > 0.
        max_entry_bytes: Larger values are not sent.
        breaker: Decides when a failing Redis is asked again.
        clock: Seconds since 1970, the same for every process that shares the Redis.

    Raises:
        CacheError: The URL is not valid.
        ConfigError: redis-py is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 0.02,
        max_entry_bytes: int = 2 * 1024**2,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._counters = Counters()
        self._link = RedisLink(url, timeout_seconds=timeout_seconds, counters=self._counters, breaker=breaker)
        self._max_entry_bytes = max_entry_bytes
        self._clock = clock

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._link.label!r})"

    @property
    def name(self) -> str:
        """``redis``."""
        return "redis"

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None."""
        sealed = self._link.read(lambda client: client.get(_ENTRY_PREFIX + key))
        value = unseal(key, sealed)
        if value is None and sealed is not None:
            # Damaged, or the reply to another request: do not use the connection again. It is idle by now.
            self._counters.add("corrupt")
            self._link.forget_connections()
        self._counters.add("misses" if value is None else "hits")
        return value

    def set(self, key: str, value: bytes, ttl_seconds: float, tags: Sequence[str] = ()) -> None:
        """Keep ``value`` for ``ttl_seconds``, unless it is larger than ``max_entry_bytes``."""
        milliseconds = int(ttl_seconds * 1000)
        if milliseconds < 1 or len(value) > self._max_entry_bytes:
            return
        sealed, now = seal(key, value), self._clock()

        def store(client: Any) -> None:
            # Tags first: an entry without its tags could not be dropped.
            add_tags(client, _TAG_PREFIX, key, tags, now, ttl_seconds)
            client.set(_ENTRY_PREFIX + key, sealed, px=milliseconds)

        self._link.write(store)

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Drop every entry with one of ``tags``; return how many there were."""
        return self._link.sweep(lambda client: sum(drop_tag(client, _TAG_PREFIX, tag, _ENTRY_PREFIX) for tag in tags))

    def clear(self) -> int:
        """Drop every answer of rag_posfix, and nothing else; return how many there were."""

        def drop(client: Any) -> int:
            count = delete_names(client, names_of(client, _ENTRY_PREFIX))
            delete_names(client, names_of(client, _TAG_PREFIX))
            return count

        return self._link.sweep(drop)

    def stats(self) -> TierStats:
        """Return what the tier has done; what Redis holds is not counted."""
        return TierStats(
            name=self.name,
            hits=self._counters["hits"],
            misses=self._counters["misses"],
            errors=self._counters["errors"],
            corrupt=self._counters["corrupt"],
            available=self._link.available,
        )

    def close(self) -> None:
        """Close the connections and end the threads."""
        self._link.close()
