"""The way to a Redis: operations with a deadline, a circuit breaker, and failures that are counted, never raised."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.deadline import DeadlineRunner
from rag_posfix.caching.health import Health
from rag_posfix.caching.redis_client import redis_target
from rag_posfix.caching.tier import Counters
from rag_posfix.errors import CacheError

__all__ = ["RedisLink"]

_SWEEP_SECONDS = 10.0  # dropping entries is rare, and worth waiting for and trying again
_SWEEP_ATTEMPTS = 3
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class RedisLink:
    """Runs operations on a Redis.

    Down, slow, full, locked or talking nonsense, Redis costs a request at most ``timeout_seconds``; then the circuit
    breaker leaves it alone, and asks again by itself after a while.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis-cluster://`` or ``redis-sentinel://``.
        timeout_seconds: Bound of one operation, connecting included, > 0.
        counters: Where ``errors`` are counted.
        breaker: Decides when a failing Redis is asked again.
        cache: What uses it, for the log.

    Raises:
        CacheError: The URL is not valid.
        ConfigError: redis-py is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float,
        counters: Counters,
        breaker: CircuitBreaker | None = None,
        cache: str = "answer cache",
    ) -> None:
        if timeout_seconds <= 0:
            raise CacheError(f"redis cache: timeout_seconds={timeout_seconds} must be above 0, e.g. 0.02")
        self._target = redis_target(url, timeout_seconds)
        self._timeout = timeout_seconds
        self._counters = counters
        self._breaker = breaker or CircuitBreaker()
        self._cache = cache
        # Apart: a full Redis refuses every write and serves every read, which would log each request.
        self._reads = Health(f"reading {self._target.label}", cache)
        self._writes = Health(f"writing {self._target.label}", cache)
        self._runner = DeadlineRunner("rag-posfix-redis")
        self._client: Any = None
        self._client_lock = threading.Lock()

    @property
    def label(self) -> str:
        """Where Redis is, without user and password."""
        return self._target.label

    @property
    def available(self) -> bool:
        """Whether Redis is believed to work."""
        return self._breaker.closed

    def read(self, operation: Callable[[Any], _T]) -> _T | None:
        """Return what ``operation`` returns for the client, or None if Redis fails or is given a rest."""
        return self._call(operation, self._reads, self._timeout)

    def write(self, operation: Callable[[Any], _T]) -> _T | None:
        """Do as ``read`` does; a Redis that refuses writes is told apart in the log."""
        return self._call(operation, self._writes, self._timeout)

    def sweep(self, operation: Callable[[Any], int]) -> int:
        """Return how many entries ``operation`` dropped: with more time, several attempts, and even if at rest."""
        for _ in range(_SWEEP_ATTEMPTS):
            count = self._call(operation, self._writes, _SWEEP_SECONDS, insist=True)
            if count is not None:
                return count
        _logger.warning("%s: %s could not drop entries; they stay until they expire", self._cache, self.label)
        return 0

    def forget_connections(self) -> None:
        """Use no idle connection again, after a reply that was damaged, or the one to another request."""
        self._disconnect(in_use=False)

    def close(self) -> None:
        """Close the connections and end the threads."""
        self._disconnect(in_use=True)
        self._runner.close()
        with self._client_lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _call(
        self, operation: Callable[[Any], _T], health: Health, seconds: float, *, insist: bool = False
    ) -> _T | None:
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
