"""Makes a Redis client from a URL, with bounded waits and without retries. Its label shows no password.

One server: ``redis://``, ``rediss://`` (TLS), ``unix://``. Several: ``redis-cluster://``, ``redis-sentinel://``, and
with TLS ``rediss-cluster://``, ``rediss-sentinel://``. Options in the URL cannot change the timeouts. The protocol is
RESP 2, which Redis 5 understands and which needs no HELLO command. The deleted tags are one sorted set without a time
to live, so that no ``volatile-`` policy evicts it.

The servers of one Redis: one, or those of a cluster, each with a deadline and a circuit breaker of its own.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from rag_posfix.caching.deletions import MAX_TAGS, PAGE_TAGS, SharedTags
from rag_posfix.caching.tier import AdaptiveDeadline, CircuitBreaker, Counters, DeadlineRunner, Guard
from rag_posfix.errors import CacheError, missing_extra

_ALLOWED = (
    "redis://[[user]:password@]host[:port][/db], rediss:// (TLS), unix://[[user]:password@]/path, "
    "redis-cluster://[[user]:password@]host:port[,host:port...] or "
    "redis-sentinel://[[user]:password@]host:port[,host:port...]/service[/db]; with TLS rediss-cluster:// and "
    "rediss-sentinel://; options: ?ssl_ca_certs=FILE and other ssl_ options, sentinel_username, sentinel_password"
)
_DEFAULT_PORTS = {
    "redis-cluster": 6379, "rediss-cluster": 6379, "redis-sentinel": 26379, "rediss-sentinel": 26379,
}  # fmt: skip
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_SENTINEL_LOGIN = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """The address of a Redis, and how to connect to it.

    Attributes:
        label: The address without user and password.
        connect: Returns a client. It may block: a cluster client asks for the nodes.
        is_cluster: Whether the keys are divided among several servers.
    """

    label: str
    connect: Callable[[], Any] = field(repr=False)
    is_cluster: bool = False


def redis_target(url: str, timeout_seconds: float) -> RedisTarget:
    """Return the Redis at ``url``. Nothing is connected.

    Args:
        timeout_seconds: Bound of connecting and of each read and write.

    Raises:
        CacheError: The URL is not valid. The message shows nothing of it but its scheme.
        ConfigError: redis-py is not installed.
    """
    try:
        import redis
    except ImportError:
        raise missing_extra("redis", "redis") from None
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options: dict[str, Any] = {
        "socket_connect_timeout": timeout_seconds,
        "socket_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "decode_responses": False,
    }
    # By default each connection begins with two CLIENT SETINFO commands, and the first reads redis-py's metadata.
    if "driver_info" in inspect.signature(redis.Redis).parameters:
        options["driver_info"] = None
    else:
        options |= {"lib_name": None, "lib_version": None}
    scheme = url.partition("://")[0]
    try:
        if scheme in _DEFAULT_PORTS:
            return _multi_host_target(redis, url, scheme, options)
        return _single_server_target(redis, url, options)
    except (KeyError, ValueError, TypeError, redis.RedisError):
        is_known_scheme = scheme in {"redis", "rediss", "unix", *_DEFAULT_PORTS}
        url_description = f"the {scheme}:// URL" if is_known_scheme else "the URL"
        # Not chained: the cause may quote the password.
        raise CacheError(
            f"redis cache: {url_description} is not valid; allowed: {_ALLOWED}; "
            "percent-encode special characters in a password"
        ) from None


def _single_server_target(redis: Any, url: str, options: dict[str, Any]) -> RedisTarget:
    address = urlsplit(url)
    if address.scheme != "unix":
        if not address.hostname:
            raise ValueError("no host")
        int(address.path.strip("/") or 0)  # redis-py would use database 0 without an error
    parsed = redis.connection.parse_url(url)
    for name in ("retry_on_timeout", "retry_on_error", "health_check_interval"):
        parsed.pop(name, None)
    pool_options = {**parsed, **options}
    redis.ConnectionPool(**pool_options).make_connection()  # does not connect, but rejects unknown options
    where = parsed.get("path") or f"{parsed['host']}:{parsed.get('port', 6379)}/{parsed.get('db', 0)}"

    def connect() -> Any:
        client = redis.Redis(connection_pool=redis.ConnectionPool(**pool_options))
        client.auto_close_connection_pool = True
        return client

    return RedisTarget(f"{address.scheme}://{where}", connect)


def _multi_host_target(redis: Any, url: str, scheme: str, options: dict[str, Any]) -> RedisTarget:
    # urlsplit does not parse URLs with several hosts.
    location, _, query = url.partition("://")[2].partition("?")
    if "#" in location:
        raise ValueError("no fragment is understood")
    authority, _, path = location.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    user, _, password = credentials.partition(":")
    nodes = [_host_and_port(host, _DEFAULT_PORTS[scheme]) for host in hosts.split(",")]
    login = {name: unquote(text) for name, text in (("username", user), ("password", password)) if text}
    chosen = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    is_cluster = scheme.endswith("-cluster")
    sentinel = {} if is_cluster else {name: chosen.pop(name) for name in _SENTINEL_LOGIN if name in chosen}
    options = {**options, **login, **_tls_options(chosen, scheme.startswith("rediss-"))}
    if is_cluster:
        if path.strip("/"):
            raise ValueError("a cluster has no databases")
        return RedisTarget(f"{scheme}://{hosts}", lambda: _cluster(redis, nodes, options), is_cluster=True)
    service, _, database = path.partition("/")
    if not service:
        raise ValueError("no service")
    options["db"] = int(database or 0)
    logins = {name.removeprefix("sentinel_"): text for name, text in sentinel.items()}
    return RedisTarget(f"{scheme}://{hosts}/{path}", lambda: _sentinel(redis, nodes, service, options, logins))


def _tls_options(chosen: dict[str, str], tls: bool) -> dict[str, Any]:
    """Return the arguments of a connection with TLS; ValueError for an option that is unknown or without TLS."""
    if not set(chosen) <= set(_TLS_OPTIONS if tls else ()):
        raise ValueError("an option is not understood")
    options: dict[str, Any] = {"ssl": True, **chosen} if tls else {}
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = {"true": True, "false": False}[chosen["ssl_check_hostname"].lower()]
    return options


def _host_and_port(text: str, default_port: int) -> tuple[str, int]:
    address = urlsplit(f"//{text}")
    if not address.hostname or address.path or address.username is not None:
        raise ValueError("no host")
    return address.hostname, address.port or default_port


def _cluster(redis: Any, nodes: list[tuple[str, int]], options: dict[str, Any]) -> Any:
    start = [redis.cluster.ClusterNode(host, port) for host, port in nodes]
    return redis.RedisCluster(startup_nodes=start, require_full_coverage=False, **options)


def _sentinel(
    redis: Any, nodes: list[tuple[str, int]], service: str, options: dict[str, Any], login: dict[str, str]
) -> Any:
    """Return a client of the master. The Sentinels have a login of their own, and TLS as the master has it."""
    shared = ("socket_connect_timeout", "socket_timeout", "retry", "protocol", "ssl", *_TLS_OPTIONS)
    connection = {name: options[name] for name in shared if name in options}
    return redis.Sentinel(nodes, sentinel_kwargs=connection | login, **options).master_for(service)


def is_rejection(error: BaseException) -> bool:
    """Whether Redis answered and rejected the command, for example because it is full or read-only."""
    from redis.exceptions import ClusterError, ResponseError

    return isinstance(error, ResponseError) and not isinstance(error, ClusterError)


def is_moved(error: BaseException) -> bool:
    """Whether a server of a cluster answered that another one has the key."""
    from redis.exceptions import MovedError

    return isinstance(error, MovedError)


def is_read_only(error: BaseException) -> bool:
    """Whether the server is a replica, or a master that became one: another server takes the writes."""
    from redis.exceptions import ResponseError

    return isinstance(error, ResponseError) and "READONLY" in f"{type(error).__name__.upper()} {error}"


def server_of(cluster: Any, name: str) -> Any:
    """Return the server of a cluster that has a key, as far as the client knows; None for a slot without a server."""
    servers = cluster.nodes_manager.slots_cache.get(cluster.keyslot(name))
    return servers[0] if servers else None


def connection_pools(client: Any) -> list[Any]:
    """Return the connection pools of a client: one, or one per node of a cluster that was used."""
    if client is None:
        return []
    if hasattr(client, "connection_pool"):
        return [client.connection_pool]
    connections = [node.redis_connection for node in client.get_nodes()]
    return [connection.connection_pool for connection in connections if connection is not None]


_T = TypeVar("_T")
# Redis tells the time: the clocks of processes do not matter. Each tag has a time of its own, so that a reading may
# end between any two.
_ADD: Final = """
local time, last = redis.call('TIME'), redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
local first = math.max(time[1] * 1000000 + time[2], (last or 0) + 1)
for i = 3, #ARGV do redis.call('ZADD', KEYS[1], string.format('%.0f', first + i - 3), ARGV[i]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', first - ARGV[1]))
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[2])
return first
"""


class TagsCaller(Protocol):
    """The Redis tier, as far as the deleted tags use it."""

    @property
    def is_closed(self) -> bool: ...

    @property
    def wait_seconds(self) -> float: ...

    def call_deletions(self, operation: Callable[[Any], _T]) -> _T | None:
        """Run an operation on a client within a time limit; return None if Redis fails."""
        ...


class RedisDeletedTags(SharedTags):
    """A sorted set of deleted tags in Redis 5 or later, by the time of the deletion, for the lifetime of entries."""

    def __init__(self, key: str, tier: TagsCaller, lifetime_seconds: float) -> None:
        self._key = key
        self._tier = tier
        self._lifetime = lifetime_seconds

    @property
    def is_closed(self) -> bool:
        return self._tier.is_closed

    @property
    def wait_seconds(self) -> float:
        return self._tier.wait_seconds

    def add(self, tags: Sequence[str]) -> int | None:
        lifetime = int(self._lifetime * 1e6)
        return self._tier.call_deletions(
            lambda client: int(client.eval(_ADD, 1, self._key, lifetime, MAX_TAGS, *tags))
        )

    def read(self, last: tuple[str, int]) -> tuple[dict[str, int], bool] | None:
        tag, read_until = last

        def read(client: Any) -> tuple[dict[str, int], bool]:
            is_lost = bool(tag) and (client.zscore(self._key, tag) or 0) < read_until
            # What is older than the lifetime was removed.
            is_lost = is_lost and read_until / 1e6 > time.time() - self._lifetime
            first = 0 if is_lost else f"({read_until}"
            page = client.zrangebyscore(self._key, first, "+inf", start=0, num=PAGE_TAGS, withscores=True)
            return {member.decode("utf-8", "replace"): int(score) for member, score in page}, is_lost

        return self._tier.call_deletions(read)


_SLOWER = 10
_LONGEST_SECONDS = 1.0
_CONNECTIONS = 4
_COOLDOWN_SECONDS = (0.5, 5.0)
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
