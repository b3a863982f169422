"""The servers of one Redis: one, or those of a cluster, each with its own deadline and circuit breaker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rag_posfix.caching.guard import CircuitBreaker, Counters
from rag_posfix.caching.redis_client import RedisTarget, redis_target, server_of
from rag_posfix.caching.redis_connection import RedisConnection, longest_wait

_T = TypeVar("_T")


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
            left = set(self._shards) - {node.name for node in cluster.get_nodes()}
            for server in [self._shards.pop(name) for name in left]:
                server.disconnect(in_use=False)
