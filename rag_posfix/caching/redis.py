"""The tier in Redis, shared by every replica of a service. Any Redis from version 5 on will do; no modules.

An entry is one string under ``rag_posfix:answer:<key>``, written with one SET that carries its time to live. A tag is
one sorted set under ``rag_posfix:tag:<tag>`` of the keys that have it, scored by when they expire, so that it cleans
itself. Every command names one key, as a cluster wants it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rag_posfix.caching.base import Counters, TierStats, seal, unseal
from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.deadline import DeadlineRunner
from rag_posfix.caching.health import Health
from rag_posfix.caching.redis_client import redis_target
from rag_posfix.errors import CacheError

__all__ = ["RedisCache"]

_ENTRY_PREFIX = "rag_posfix:answer:"
_TAG_PREFIX = "rag_posfix:tag:"
_SWEEP_SECONDS = 10.0  # dropping entries is rare, and worth waiting for and trying again
_SWEEP_ATTEMPTS = 3
_SWEEP_BATCH = 500
_CLOCK_SKEW_SECONDS = 60.0
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


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
        if timeout_seconds <= 0:
            raise CacheError(f"redis cache: timeout_seconds={timeout_seconds} must be above 0, e.g. 0.02")
        self._target = redis_target(url, timeout_seconds)
        self._timeout = timeout_seconds
        self._max_entry_bytes = max_entry_bytes
        self._breaker = breaker or CircuitBreaker()
        self._clock = clock
        # Apart: a full Redis refuses every write and serves every read, which would log each request.
        self._reads = Health(f"reading {self._target.label}")
        self._writes = Health(f"writing {self._target.label}")
        self._runner = DeadlineRunner("rag-posfix-redis")
        self._counters = Counters()
        self._client: Any = None
        self._client_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._target.label!r})"

    @property
    def name(self) -> str:
        """``redis``."""
        return "redis"

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None."""
        sealed = self._call(lambda client: client.get(_ENTRY_PREFIX + key), self._reads, self._timeout)
        value = unseal(key, sealed)
        if value is None and sealed is not None:
            # Damaged, or the reply to another request: do not use the connection again. It is idle by now.
            self._counters.add("corrupt")
            self._disconnect(in_use=False)
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
            _add_tags(client, key, tags, now, ttl_seconds)
            client.set(_ENTRY_PREFIX + key, sealed, px=milliseconds)

        self._call(store, self._writes, self._timeout)

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Drop every entry with one of ``tags``; return how many there were."""
        return self._sweep(lambda client: sum(_drop_tag(client, tag) for tag in tags))

    def clear(self) -> int:
        """Drop every entry of rag_posfix, and nothing else; return how many there were."""

        def drop(client: Any) -> int:
            count = _delete(client, client.scan_iter(match=_ENTRY_PREFIX + "*", count=_SWEEP_BATCH))
            _delete(client, client.scan_iter(match=_TAG_PREFIX + "*", count=_SWEEP_BATCH))
            return count

        return self._sweep(drop)

    def stats(self) -> TierStats:
        """Return what the tier has done; what Redis holds is not counted."""
        return TierStats(
            name=self.name,
            hits=self._counters["hits"],
            misses=self._counters["misses"],
            errors=self._counters["errors"],
            corrupt=self._counters["corrupt"],
            available=self._breaker.closed,
        )

    def close(self) -> None:
        """Close the connections and end the threads."""
        self._disconnect(in_use=True)
        self._runner.close()
        with self._client_lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _sweep(self, operation: Callable[[Any], int]) -> int:
        for _ in range(_SWEEP_ATTEMPTS):
            count = self._call(operation, self._writes, _SWEEP_SECONDS, insist=True)
            if count is not None:
                return count
        _logger.warning("answer cache: %s could not drop entries; they stay until they expire", self._target.label)
        return 0

    def _call(
        self, operation: Callable[[Any], _T], health: Health, seconds: float, *, insist: bool = False
    ) -> _T | None:
        """Return what ``operation`` returns for the client, or None if Redis fails or is given a rest."""
        from redis.exceptions import ClusterError, ResponseError

        trial = not self._breaker.closed
        if not (self._breaker.allow() or insist):
            return None
        if trial and self._runner.running:
            self._disconnect(in_use=True)  # frees threads that a dripping server still holds
        try:
            result = self._runner.run(lambda: operation(self._connected()), seconds)
        except Exception as error:
            self._counters.add("errors")
            health.failed(error)
            if isinstance(error, ResponseError) and not isinstance(error, ClusterError):
                self._breaker.success()  # it refuses this command (full, read-only), but at once: reads may work
            else:
                self._breaker.failure()
            return None
        self._breaker.success()
        health.worked()
        return result

    def _connected(self) -> Any:
        with self._client_lock:
            if self._client is None:
                self._client = self._target.connect()
            return self._client

    def _disconnect(self, *, in_use: bool) -> None:
        if not self._client_lock.acquire(blocking=False):
            return  # somebody is connecting right now: there is nothing to disconnect
        try:
            for pool in _pools(self._client):
                pool.disconnect(inuse_connections=in_use)
        finally:
            self._client_lock.release()


def _pools(client: Any) -> list[Any]:
    if client is None:
        return []
    if hasattr(client, "connection_pool"):
        return [client.connection_pool]
    connections = [node.redis_connection for node in client.get_nodes()]  # a cluster has a pool per node, once used
    return [connection.connection_pool for connection in connections if connection is not None]


def _add_tags(client: Any, key: str, tags: Sequence[str], now: float, ttl_seconds: float) -> None:
    if not tags:
        return
    pipeline = client.pipeline(transaction=False)
    for tag in tags:
        name = _TAG_PREFIX + tag
        pipeline.zremrangebyscore(name, "-inf", now - _CLOCK_SKEW_SECONDS)
        pipeline.zadd(name, {key: now + ttl_seconds})
        pipeline.ttl(name)
    remaining = pipeline.execute()[2::3]
    # EXPIRE only ever later (its GT option is Redis 7): a tag must outlive each of its entries.
    lifetime = int(ttl_seconds + _CLOCK_SKEW_SECONDS) + 1
    for tag, seconds in zip(tags, remaining, strict=True):
        if seconds < lifetime - 1:
            pipeline.expire(_TAG_PREFIX + tag, lifetime)
    pipeline.execute()


def _drop_tag(client: Any, tag: str) -> int:
    name = _TAG_PREFIX + tag
    keys = client.zrange(name, 0, -1)
    count = _delete(client, (_ENTRY_PREFIX.encode() + key for key in keys))
    # Not DEL: an entry that was added meanwhile keeps its tag.
    for start in range(0, len(keys), _SWEEP_BATCH):
        client.zrem(name, *keys[start : start + _SWEEP_BATCH])
    return count


def _delete(client: Any, names: Iterator[bytes]) -> int:
    count, pipeline = 0, client.pipeline(transaction=False)
    for name in names:
        pipeline.delete(name)
        if len(pipeline) >= _SWEEP_BATCH:
            count += int(sum(pipeline.execute()))
    return count + int(sum(pipeline.execute()))
