"""The connection of a tier to Redis: operations with a deadline and a circuit breaker. Failures are never raised."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from rag_posfix.caching.adaptive_deadline import AdaptiveDeadline
from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.deadline import DeadlineRunner
from rag_posfix.caching.redis_client import redis_target
from rag_posfix.caching.store_access import StoreAccess, StoreFailures
from rag_posfix.caching.tier import Counters
from rag_posfix.errors import CacheError

_SLOWER = 10
_LONGEST_SECONDS = 1.0
_COOLDOWN_SECONDS = (0.5, 5.0)
_DELETE_SECONDS = 10.0
_DELETE_ATTEMPTS = 3
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class RedisLink:
    """Runs operations on a Redis.

    If Redis is down, full, locked or replies with garbage, an operation takes ``timeout_seconds`` at most and returns
    None. The circuit breaker then skips Redis, and tries it again after its cool-down: half a second at first, five at
    most. If Redis answers, but late (a busy machine or network), the deadline follows the measured latency, up to ten
    times ``timeout_seconds`` and to one second; and the late answer closes the breaker.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis-cluster://`` or ``redis-sentinel://``.
        timeout_seconds: Bound of one operation while Redis is fast, connecting included, > 0.
        counters: Where ``errors`` are counted.

    Raises:
        CacheError: The URL is not valid.
        ConfigError: redis-py is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float,
        cache: str,
        counters: Counters,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        if timeout_seconds <= 0:
            raise CacheError(f"redis cache: timeout_seconds={timeout_seconds} must be above 0, e.g. 0.02")
        longest = max(timeout_seconds, min(_SLOWER * timeout_seconds, _LONGEST_SECONDS))
        self._target = redis_target(url, longest)
        self._deadline = AdaptiveDeadline(timeout_seconds, longest)
        self._cache = cache
        self._breaker = breaker or CircuitBreaker(*_COOLDOWN_SECONDS)
        failures = StoreFailures(cache, counters, self._breaker, is_refusal=_is_refusal)
        self._reads = StoreAccess(f"reading {self._target.label}", failures)
        self._writes = StoreAccess(f"writing {self._target.label}", failures, skipped="skipped_writes")
        self._runner = DeadlineRunner("rag-posfix-redis")
        self._client: Any = None
        self._client_lock = threading.Lock()

    @property
    def label(self) -> str:
        """The address of Redis, without user and password."""
        return self._target.label

    @property
    def available(self) -> bool:
        """False while Redis is failing and the circuit breaker is open."""
        return self._breaker.closed

    def read(self, operation: Callable[[Any], _T]) -> _T | None:
        """Return what ``operation`` returns for the client, or None if Redis fails or the circuit breaker is open."""
        return self._measured(operation, self._reads)

    def write(self, operation: Callable[[Any], _T]) -> _T | None:
        """Do the same as ``read``; in the log, a Redis that refuses writes is separate from one that fails to read."""
        return self._measured(operation, self._writes)

    def delete(self, operation: Callable[[Any], int]) -> int:
        """Return how many entries ``operation`` deleted, 0 if Redis fails.

        Deleting is rare and must not be lost: it has 10 seconds, three attempts, and ignores the circuit breaker.
        """
        for _ in range(_DELETE_ATTEMPTS):
            count = self._call(operation, self._writes, _DELETE_SECONDS, ignore_breaker=True)
            if count is not None:
                return count
        _logger.warning("%s: %s could not drop entries; they stay until they expire", self._cache, self.label)
        return 0

    def discard_idle_connections(self) -> None:
        """Close idle connections, after a reply that was damaged or belonged to another request."""
        self._disconnect(in_use=False)

    def close(self) -> None:
        """Close the connections and end the threads."""
        self._disconnect(in_use=True)
        self._runner.close()
        with self._client_lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def deadline_seconds(self) -> float:
        """How long an operation may take now."""
        return self._deadline.seconds

    def _measured(self, operation: Callable[[Any], _T], access: StoreAccess) -> _T | None:
        """Run an operation within the deadline of now, and take its latency, also if nobody waits for it any more."""
        seconds, started = self._deadline.seconds, time.monotonic()

        def run(client: Any) -> _T:
            result = operation(client)
            latency = time.monotonic() - started
            self._deadline.record(latency)
            if latency > seconds:  # late, but Redis works
                self._breaker.success()
            return result

        return self._call(run, access, seconds)

    def _call(
        self, operation: Callable[[Any], _T], access: StoreAccess, seconds: float, *, ignore_breaker: bool = False
    ) -> _T | None:
        was_failing = not self._breaker.closed

        def run() -> _T:
            if was_failing and self._runner.running:
                self._disconnect(in_use=True)  # ends operations that wait for a server that never finishes its reply
            return self._runner.run(lambda: operation(self._connected()), seconds)

        return access.call(run, ignore_breaker=ignore_breaker)

    def _connected(self) -> Any:
        with self._client_lock:
            if self._client is None:
                self._client = self._target.connect()
            return self._client

    def _disconnect(self, *, in_use: bool) -> None:
        if not self._client_lock.acquire(blocking=False):
            return  # another thread is connecting right now: there is nothing to disconnect
        try:
            for pool in _pools(self._client):
                pool.disconnect(inuse_connections=in_use)
        finally:
            self._client_lock.release()


def _is_refusal(error: BaseException) -> bool:
    """Return whether Redis answered and refused the command, for example because it is full or read-only."""
    from redis.exceptions import ClusterError, ResponseError

    return isinstance(error, ResponseError) and not isinstance(error, ClusterError)


def _pools(client: Any) -> list[Any]:
    if client is None:
        return []
    if hasattr(client, "connection_pool"):
        return [client.connection_pool]
    connections = [node.redis_connection for node in client.get_nodes()]  # a cluster has one pool per node, once used
    return [connection.connection_pool for connection in connections if connection is not None]
