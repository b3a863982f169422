"""The Redis tier of the answer cache, shared by every replica of a service. Needs Redis 5 or later and no modules.

An entry is one string under ``rag_posfix:answer:<key>``, written with one SET that carries its time to live. A tag is
one sorted set under ``rag_posfix:tag:<tag>``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rag_posfix.caching.answers.seal import seal, unseal
from rag_posfix.caching.answers.tier import ANSWER_BACKENDS, ANSWER_CACHE
from rag_posfix.caching.backends import Locality
from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.redis_keyspace import RedisKeyspace
from rag_posfix.caching.redis_link import RedisLink
from rag_posfix.caching.tier import Counters, TierStats
from rag_posfix.settings import CacheSettings

_KEYSPACE = RedisKeyspace(entry_prefix="rag_posfix:answer:", tag_prefix="rag_posfix:tag:")
_ENVELOPE_BYTES = 64 * 1024  # room for what is stored with an answer: its key and the tags of some thousand documents


class RedisCache:
    """Keeps entries in Redis. A failing Redis costs a request ``timeout_seconds`` at most; see ``RedisLink``.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis-cluster://`` or ``redis-sentinel://``.
        timeout_seconds: Bound of one operation while Redis is fast, connecting included, > 0.
        max_entry_bytes: Larger values are not sent.
        clock: Seconds since 1970, the same for every process that shares the Redis.

    Raises:
        CacheError: The URL is not valid.
        ConfigError: redis-py is not installed.
    """

    name = "redis"

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
        self._link = RedisLink(
            url, timeout_seconds=timeout_seconds, cache=ANSWER_CACHE, counters=self._counters, breaker=breaker
        )
        self._max_entry_bytes = max_entry_bytes
        self._clock = clock

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._link.label!r})"

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None."""
        reply = self._link.read(lambda client: (client.get(_KEYSPACE.entry(key)),))
        if reply is None:  # counted as skipped or as an error
            return None
        (sealed,) = reply
        value = unseal(key, sealed)
        if value is None and sealed is not None:
            # Damaged, or the reply to another request: the connection, which is idle by now, must not be used again.
            self._counters.add("corrupt")
            self._link.discard_idle_connections()
        self._counters.add("misses" if value is None else "hits")
        return value

    def set(self, key: str, value: bytes, ttl_seconds: float, tags: Sequence[str] = ()) -> None:
        """Keep ``value`` for ``ttl_seconds``, unless it is larger than ``max_entry_bytes``."""
        milliseconds = int(ttl_seconds * 1000)
        if milliseconds < 1 or len(value) > self._max_entry_bytes:
            return
        sealed, now = seal(key, value), self._clock()

        def store(client: Any) -> None:
            _KEYSPACE.add_tags(client, key, tags, now, ttl_seconds)
            client.set(_KEYSPACE.entry(key), sealed, px=milliseconds)

        self._link.write(store)

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were."""
        return self._link.delete(lambda client: _KEYSPACE.delete_tags(client, tags))

    def clear(self) -> int:
        """Delete every answer of rag_posfix, and nothing else; return how many there were."""
        return self._link.delete(_KEYSPACE.clear)

    def stats(self) -> TierStats:
        """Return what the tier has done; what Redis holds is not counted."""
        return TierStats.counted(self.name, self._counters, available=self._link.available)

    def close(self) -> None:
        """Close the connections and end the threads."""
        self._link.close()


@ANSWER_BACKENDS.register(RedisCache.name, Locality.NETWORK)
def _open(settings: CacheSettings, _: Path) -> RedisCache | None:
    if settings.redis_url is None:
        return None
    return RedisCache(
        settings.redis_url.get_secret_value(),
        timeout_seconds=settings.redis_timeout_seconds,
        max_entry_bytes=settings.max_entry_bytes + _ENVELOPE_BYTES,
    )
