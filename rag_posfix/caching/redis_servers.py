"""The servers of one Redis: one, or those of a cluster, each with a deadline and a circuit breaker of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from rag_posfix.caching.deadline import AdaptiveDeadline, DeadlineRunner
from rag_posfix.caching.guard import CircuitBreaker, Counters, Guard
from rag_posfix.caching.redis_client import (
    RedisTarget,
    connection_pools,
    is_moved,
    is_read_only,
    is_rejection,
    redis_target,
    server_of,
)

_SLOWER = 10
_LONGEST_SECONDS = 1.0
_CONNECTIONS = 4
_COOLDOWN_SECONDS = (0.5, 5.0)
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


def longest_wait(timeout_seconds: float) -> float:
    """Return how long to wait for a Redis that is late, in seconds."""
    return max(timeout_seconds, min(_SLOWER * timeout_seconds, _LONGEST_SECONDS))


class RedisConnection:
    """A client of Redis that connects at its first use, and the threads in which it is called.

    Args:
        cache: What Redis is used for, for the log.
        probe_key: A key whose value is read to see whether Redis works again.
        timeout_seconds: Time limit of a call while Redis is fast; it follows the latency up to ``longest_wait``.
        rediscover: Called before each probe, and if Redis says that another server has a key; it may block. None
            for a Redis that is no cluster.
    """

    def __init__(
        self,
        cache: str,
        target: RedisTarget,
        probe_key: str,
        timeout_seconds: float,
        counters: Counters | None = None,
        breaker: CircuitBreaker | None = None,
        rediscover: Callable[[], object] | None = None,
    ) -> None:
        self._cache = cache
        self._target = target
        self._probe_key = probe_key
        self._timeout = timeout_seconds
        self._rediscover = rediscover
        self._counters = counters or Counters()
        self._breaker = breaker or CircuitBreaker(*_COOLDOWN_SECONDS)
        self._guard = Guard(cache, self._counters, self._breaker, is_rejection=is_rejection)
        self._deadline = AdaptiveDeadline(timeout_seconds, longest_wait(timeout_seconds))
        self._runner = DeadlineRunner("rag-posfix-redis", _CONNECTIONS)
        self._client: Any = None
        self._client_lock = threading.Lock()
        self._last_probe: object = None
        self._logged_moved = False
        self._closed = False

    @property
    def available(self) -> bool:
        """Whether the circuit breaker is closed."""
        return self._breaker.closed

    @property
    def wait_seconds(self) -> float:
        """How long to wait for Redis, by its measured latency."""
        return self._deadline.seconds

    @property
    def client(self) -> Any:
        """The client; None before it first connected."""
        return self._client

    def start(
        self, use: str, operation: Callable[[Any], _T], default: _T, *, round_trips: int = 1
    ) -> Callable[[], _T]:
        """Call Redis, and record the latency, also after the deadline; return what waits for the result.

        While the breaker is open, Redis is not called: a probe is started if it is time for one.

        Args:
            use: ``reading`` or ``writing``.
            round_trips: How often the operation waits for Redis. They count if Redis is slow.
        """
        if not self._breaker.closed:
            if self._breaker.allow():
                if self._runner.is_full:  # all wait for a server that never finishes its replies
                    self.disconnect(in_use=True)
                self._last_probe = probe = object()
                self._runner.start(lambda: self._probe(probe))
            self._counters.add("skipped" if use == "reading" else "skipped_writes")
            return lambda: default
        started, seconds = time.monotonic(), self._deadline.seconds
        if seconds > self._timeout:
            seconds = min(round_trips * seconds, _LONGEST_SECONDS)

        def run() -> _T:
            result = self._execute(operation)
            latency = time.monotonic() - started
            self._deadline.record(latency / round_trips)
            if seconds < latency <= round_trips * self._deadline.usable_seconds:  # late, but Redis works
                self._breaker.success()
            return result

        return self._waiting(use, run, default, seconds)

    def call(self, use: str, operation: Callable[[Any], _T], default: _T, seconds: float) -> _T:
        """Call Redis within a time limit, also while the circuit breaker is open."""
        return self._waiting(use, lambda: self._execute(operation), default, seconds, ignore_breaker=True)()

    def run(self, operation: Callable[[Any], _T], seconds: float) -> _T:
        """Call Redis within a time limit; a failure is raised, and the circuit breaker is not used."""
        return self._runner.run(lambda: self._execute(operation), seconds)

    def disconnect(self, *, in_use: bool) -> None:
        """Close the connections, those in use too if ``in_use``. Later calls connect again."""
        if not self._client_lock.acquire(blocking=False):
            return  # another thread is connecting right now: there is nothing to disconnect
        try:
            for pool in connection_pools(self._client):
                pool.disconnect(inuse_connections=in_use)
        finally:
            self._client_lock.release()

    def close(self) -> None:
        """Close the connections and end the threads."""
        self._closed = True
        self.disconnect(in_use=True)
        self._runner.close()
        with self._client_lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _waiting(
        self, use: str, run: Callable[[], _T], default: _T, seconds: float, *, ignore_breaker: bool = False
    ) -> Callable[[], _T]:
        use, deadline = f"{use} {self._target.label}", time.monotonic() + seconds
        try:
            future = self._runner.start(run)
        except RuntimeError as error:  # it is closed, or there are no more threads
            future = Future()
            future.set_exception(error)

        def wait() -> _T:
            try:
                return future.result(max(0.0, deadline - time.monotonic()))
            finally:
                future.cancel()  # if it has not begun, it never will

        return lambda: self._guard.call(use, wait, default, ignore_breaker=ignore_breaker)

    def _probe(self, probe: object) -> None:
        """Read, open further connections, and close the breaker if Redis is fast enough to be waited for.

        A probe that hung until a later one began reports nothing.
        """
        works = False
        try:
            if self._rediscover is not None:
                self._rediscover()
            client = self._connect()
            for _ in range(2):  # the first attempt may connect
                started = time.monotonic()
                client.get(self._probe_key)
                latency = time.monotonic() - started
                if works := latency <= self._deadline.usable_seconds:
                    break
            self._deadline.record(latency)
            with suppress(Exception), ExitStack() as stack:
                for pool in connection_pools(client):
                    for _ in range(min(_CONNECTIONS, pool.max_connections)):
                        stack.callback(pool.release, pool.get_connection())
        except Exception as error:
            works = is_rejection(error)
            if not self._closed:
                self._guard.failed(f"reading {self._target.label}", error)
        if probe is self._last_probe:
            (self._breaker.success if works else self._breaker.failure)()

    def _execute(self, operation: Callable[[Any], _T]) -> _T:
        client = self._connect()
        try:
            return operation(client)
        except Exception as error:
            if is_read_only(error):
                self._reconnect(client)
            elif is_moved(error):
                self._handle_moved()
            raise

    def _reconnect(self, client: Any) -> None:
        """Let later calls use new connections: the name of the server may be another server's after a failover."""
        with self._client_lock:
            if self._client is client:
                self._client = None
        for pool in connection_pools(client):  # connections in use end with the client
            pool.disconnect(inuse_connections=False)

    def _handle_moved(self) -> None:
        if self._rediscover is not None:
            self._rediscover()
        elif not self._logged_moved:
            self._logged_moved = True
            _logger.warning(
                "%s: %s is a node of a Redis Cluster, and other nodes have some of the keys; write its address as "
                "redis-cluster://HOST:PORT, with TLS as rediss-cluster://", self._cache, self._target.label,
            )  # fmt: skip

    def _connect(self) -> Any:
        with self._client_lock:
            if self._client is None:
                self._client = self._target.connect()
            return self._client


class RedisServers:
    """Calls the servers that have some keys. While one of a cluster is skipped, the others are used.

    Args:
        cache: What Redis is used for, for the log.
        probe_key: A key whose value is read to see whether Redis works again.
        timeout_seconds: As in ``RedisConnection``.
        breaker: Of one server, or of finding the servers of a cluster.

    Attributes:
        label: The address without user and password.
        root: One server; of a cluster the client of all servers, for operations that are rare.
    """

    def __init__(
        self,
        cache: str,
        url: str,
        probe_key: str,
        timeout_seconds: float,
        counters: Counters | None = None,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        target = redis_target(url, longest_wait(timeout_seconds))
        self._cache = cache
        self._timeout = timeout_seconds
        self._counters = counters
        self._is_cluster = target.is_cluster
        self._shards: dict[str, RedisConnection] = {}  # of a cluster, by server
        self._lock = threading.Lock()
        self.label = target.label
        self.root = RedisConnection(cache, target, probe_key, timeout_seconds, counters, breaker)

    @property
    def available(self) -> bool:
        """Whether no server is skipped."""
        return all(server.available for server in self._all()[1:] or [self.root])

    def call_each(
        self, use: str, names: Iterable[str], operation: Callable[[Any, Sequence[str]], None], *, round_trips: int = 1
    ) -> set[str]:
        """Run an operation on each server that has some of the Redis keys ``names``, on all at once.

        Returns:
            The names for which it worked.
        """
        names_by_server: dict[RedisConnection, list[str]] = {}
        for name in names:
            if (server := self._server_of(use, name)) is not None:
                names_by_server.setdefault(server, []).append(name)

        def start(server: RedisConnection, names_here: Sequence[str]) -> Callable[[], bool]:
            def run(client: Any) -> bool:
                operation(client, names_here)
                return True

            return server.start(use, run, False, round_trips=round_trips)

        started = [(names_here, start(server, names_here)) for server, names_here in names_by_server.items()]
        return {name for names_here, wait in started if wait() for name in names_here}

    def call(self, use: str, name: str, operation: Callable[[Any], _T]) -> _T | None:
        """Run an operation on the server that has a Redis key; return None if it fails or is skipped."""
        server = self._server_of(use, name)
        return None if server is None else server.start(use, operation, None)()

    def disconnect(self) -> None:
        """Close the connections that are not in use."""
        for server in self._all():
            server.disconnect(in_use=False)

    def close(self) -> None:
        """Close all connections and end the threads."""
        for server in reversed(self._all()):
            server.close()

    def _all(self) -> list[RedisConnection]:
        with self._lock:
            return [self.root, *self._shards.values()]

    def _server_of(self, use: str, name: str) -> RedisConnection | None:
        """Return the server that has a Redis key; None for a slot without one, or if the cluster cannot be asked."""
        if not self._is_cluster:
            return self.root
        cluster = self.root.client or self.root.start(use, lambda client: client, None)()
        if cluster is None or (node := server_of(cluster, name)) is None:
            return None
        with self._lock:
            if node.name not in self._shards:
                scheme = self.label.partition("://")[0]
                target = RedisTarget(f"{scheme}://{node.name}", lambda: cluster.get_redis_connection(node))
                self._shards[node.name] = RedisConnection(
                    self._cache, target, name, self._timeout, self._counters, rediscover=self._rediscover
                )
            return self._shards[node.name]

    def _rediscover(self) -> None:
        """Ask the cluster which server has which keys, and forget servers that left."""
        cluster = self.root.client
        cluster.nodes_manager.initialize()
        with self._lock:
            names = set(self._shards) - {node.name for node in cluster.get_nodes()}
            left = [self._shards.pop(name) for name in names]
        for server in left:
            server.close()
