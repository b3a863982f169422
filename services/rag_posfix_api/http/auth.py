"""Access by API key: the caller and the scopes of a key.

Quotas of API keys: in this process, or in Redis for all processes of a service.

In Redis the quotas of a key are one sorted set, changed by one script in one round trip. Its member ``rate`` has the
theoretical arrival time of the generic cell rate algorithm (ITU-T I.371) as its score, which is equal to the token
bucket of ``Quotas``; each running request is a member with the time at which it is given up, for a process may die.
Redis's own clock counts, the same for all processes.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import math
import re
import secrets
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import anyio
import anyio.to_thread
from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import Scope

from rag_posfix.caching.redis_client import RedisServers
from rag_posfix_api.http.errors import RequestError
from rag_posfix_api.keys.store import SCOPES, KeyStore, digest, split_key

_log = logging.getLogger(__name__)

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_SEARCH = re.compile(r"/v1/collections/[^/]*/search")

_PROXY_HEADERS = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip")
"""What proxies add to the requests of others."""
_REJECTIONS_PER_SECOND = 50
_MAX_PAUSE_SECONDS = 5.0
_MAX_SOURCES = 4096


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from.

    Attributes:
        tenant: Name of the tenant; "" for the operator's single key and for a service without keys.
        scopes: What the caller may do.
        salt: Separates the cache entries of the tenant; a random part of it is in the key file only.
        key_id: Id of the key, or None without one.
        requests_per_minute: As in ``ApiKey``.
        max_concurrent: As in ``ApiKey``.
        filter: As in ``ApiKey``.
    """

    tenant: str = ""
    scopes: tuple[str, ...] = ()
    salt: str = field(default="", repr=False)
    key_id: str | None = None
    requests_per_minute: int | None = None
    max_concurrent: int | None = None
    filter: Mapping[str, Any] | None = field(default=None, hash=False)


ANONYMOUS: Final = Caller(scopes=("read", "write", "metrics"))
"""The caller of a service without any key."""

OPERATOR: Final = Caller(scopes=SCOPES)
"""The caller with the single key of the settings."""

CALLER: ContextVar[Caller] = ContextVar("rag_posfix_caller", default=ANONYMOUS)
"""The caller of the running request."""


def required_scope(method: str, path: str) -> str:
    """Return the scope that a request needs.

    Keys and reloads are for ``admin``; metrics, which name tenants, for ``metrics``; changing collections is for
    ``write``; everything else, searching included, for ``read``.
    """
    if path == "/metrics":
        return "metrics"
    if path == "/admin" or path.startswith(("/admin/", "/v1/admin/")):
        return "admin"
    if path == "/v1/collections" or path.startswith("/v1/collections/"):
        searches = method == "POST" and _SEARCH.fullmatch(path) is not None
        return "read" if searches or method in _READING else "write"
    return "read"


class KeyChecker:
    """Checks presented keys against the single key of the settings and the key file.

    A key is looked up each time: a revocation counts for the next request, in every process that reads the file.

    Args:
        always: Whether requests need a key although there is none.
        open_to_proxies: Whether proxies may bring requests of others while there is no key.
    """

    def __init__(
        self, store: KeyStore, single: SecretStr | None = None, *, always: bool = False, open_to_proxies: bool = False
    ) -> None:
        self._store = store
        self._always, self._open_to_proxies = always, open_to_proxies
        self._one_reader = anyio.Lock()
        self._single = None if single is None else _hash(single.get_secret_value().encode())

    @property
    def required(self) -> bool:
        """Whether requests need a key: one is in the settings or was ever created, or the operator says so."""
        return self._always or self._single is not None or self._store.has_keys

    async def allowed(self, method: str, path: str, headers: Headers) -> Caller:
        """Return the caller of a request that its key allows.

        Raises:
            RequestError: the key is missing or wrong, lacks the scope of the request, or is not that of the settings
                while the key file cannot be read.
        """
        scope = required_scope(method, path)
        await self.refresh()
        if not self.required:
            if not self._open_to_proxies and any(name in headers for name in _PROXY_HEADERS):
                raise RequestError(
                    "a proxy brought this request, and the service has no API key that others could need; create one "
                    "on the server with: rag-posfix keys create TENANT, or set RAG_POSFIX_SERVICE_ALLOW_ANONYMOUS",
                    code="invalid_api_key",
                )
            if scope in ANONYMOUS.scopes:
                return ANONYMOUS
            raise RequestError(
                "this needs a key with the scope 'admin', and none exists; create one on the server",
                code="insufficient_scope",
            )
        presented = _read_key(headers)
        caller = None if presented is None else self.caller(presented)
        if caller is None:
            if presented is not None and self._store.describe_failing() is not None:
                raise RequestError("the API keys cannot be read now; try again later", code="keys_unavailable")
            problem = "missing" if presented is None else "wrong"
            raise RequestError(
                f"the API key is {problem}; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )
        if scope not in caller.scopes:
            raise RequestError(
                f"the API key lacks the scope {scope!r} that the request needs; use a key that has it",
                code="insufficient_scope",
            )
        return caller

    def caller(self, presented: bytes) -> Caller | None:
        """Return who presents a key, or None for a wrong or revoked one."""
        if self._single is not None and hmac.compare_digest(_hash(presented), self._single):
            return OPERATOR
        identity, secret = split_key(presented.decode("latin-1")) or ("", "")
        key = self._store.table().keys.get(identity)
        if key is None or key.revoked_at is not None:
            return None
        if not hmac.compare_digest(key.hash.encode(), digest(identity, secret).encode()):
            return None
        salt = self._store.table().salts.get(key.tenant, "")
        return Caller(
            key.tenant,
            key.scopes,
            f"{key.tenant}:{salt}",
            key.id,
            key.requests_per_minute,
            key.max_concurrent,
            key.filter,
        )

    async def refresh(self) -> None:
        """Read a changed key file in a thread, once: 20,000 keys take a while."""
        if self._store.is_stale:
            async with self._one_reader:
                if self._store.is_stale:
                    await anyio.to_thread.run_sync(self._store.table)


def _read_key(headers: Headers) -> bytes | None:
    """Return the key of a request; None without one, "" for malformed or contradictory headers."""
    authorizations, keys = headers.getlist("authorization"), headers.getlist("x-api-key")
    if len(authorizations) > 1 or len(keys) > 1:  # a proxy may have checked the other one
        return b""
    if authorizations and authorizations[0]:
        scheme, _, key = authorizations[0].partition(" ")
        return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
    return keys[0].strip().encode("latin-1") or None if keys else None  # Anthropic's clients


def _hash(key: bytes) -> bytes:
    """Return bytes of one length, so that a comparison does not show the length of a key."""
    return hashlib.blake2b(key).digest()


class Rejections:
    """Spreads rejections: those of a source are 1/50 s apart, and each waits for at most 5 s.

    Clients that repeat wrong keys on many connections then cost little of the event loop, and no other source waits
    for them. Of the sources that were rejected in the last seconds 4,096 are remembered. ``clock`` returns monotonic
    seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next: OrderedDict[str, float] = OrderedDict()  # when the next one is due, the last rejected source last

    def pause(self, source: str) -> float:
        """Return the seconds that the next rejection of a source waits."""
        current_time = self._clock()
        pause = min(max(self._next.pop(source, 0.0) - current_time, 0.0), _MAX_PAUSE_SECONDS)
        self._next[source] = current_time + pause + 1 / _REJECTIONS_PER_SECOND
        if len(self._next) > _MAX_SOURCES:
            self._next.popitem(last=False)
        return pause


def source_of(scope: Scope) -> str:
    """Return where a request comes from: the address of the client, or its network of 64 bits for IPv6."""
    host = str((scope.get("client") or ("",))[0])
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)


_MAX_ENDED: Final = 1000
_PREFIX: Final = "rag_posfix:quota:"
_TAKE: Final = """
local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = time[1] + time[2] / 1000000
end
local rate, most, lease = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if #ARGV > 5 then redis.call('ZREM', KEYS[1], unpack(ARGV, 6)) end
local arrival = redis.call('ZSCORE', KEYS[1], 'rate')
local running = redis.call('ZCARD', KEYS[1]) - (arrival and 1 or 0)
if most > 0 and running >= most then return {'running', tostring(running)} end
if rate > 0 then
    arrival = math.max(tonumber(arrival or 0), now) + 60 / rate
    if arrival - now > 60 + 0.000001 then return {'rate', string.format('%.6f', arrival - now - 60)} end
    redis.call('ZADD', KEYS[1], string.format('%.6f', arrival), 'rate')
end
if most > 0 then redis.call('ZADD', KEYS[1], string.format('%.6f', now + lease), ARGV[5]) end
redis.call('PEXPIRE', KEYS[1], math.ceil(1000 * math.max(lease, 60)))
return {'taken', ''}
"""

Release = Callable[[], Awaitable[None]]
"""Ends the count of a running request."""


@dataclass(slots=True)
class _Use:
    tokens: float
    counted_at: float
    running: int = 0


def _too_many_running(running: int, max_concurrent: int | None) -> RequestError:
    return RequestError(
        f"{running} requests of this key are running and {max_concurrent} are allowed; wait until one ends",
        retry_seconds=1,
        code="rate_limit_exceeded",
    )


def _too_often(rate: int | None, wait_seconds: float) -> RequestError:
    seconds = max(1, math.ceil(wait_seconds))
    return RequestError(
        f"this key may make {rate} requests a minute; try again in {seconds} seconds",
        retry_seconds=seconds,
        code="rate_limit_exceeded",
    )


class Quotas:
    """Counts the requests of each key, per minute as a token bucket, and at the same time. Per process.

    A key with ``requests_per_minute`` = n may make n requests at once, and gains one every 60 / n seconds. Safe to use
    from any thread. ``clock`` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}
        self._lock = threading.Lock()

    async def take(self, caller: Caller) -> Release:
        """Count a request until ``Release`` is called; a caller without limits is not counted.

        Raises:
            RequestError: a limit of the caller's key is reached.
        """
        if caller.key_id is None or (caller.requests_per_minute is None and caller.max_concurrent is None):
            return _nothing
        return partial(self._release, self._take(caller, caller.key_id))

    def close(self) -> None:
        """Close connections; a later request opens them again."""

    async def _release(self, use: _Use) -> None:
        with self._lock:
            use.running -= 1

    def _take(self, caller: Caller, key_id: str) -> _Use:
        rate, max_concurrent = caller.requests_per_minute, caller.max_concurrent
        current_time = self._clock()
        with self._lock:
            use = self._uses.setdefault(key_id, _Use(float(rate or 0), current_time))
            if max_concurrent is not None and use.running >= max_concurrent:
                raise _too_many_running(use.running, max_concurrent)
            if rate is not None:
                use.tokens = min(float(rate), use.tokens + (current_time - use.counted_at) * rate / 60)
                use.counted_at = current_time
                if use.tokens < 1:
                    raise _too_often(rate, (1 - use.tokens) * 60 / rate)
                use.tokens -= 1
            use.running += 1
            return use


class SharedQuotas(Quotas):
    """Counts the requests of each key in Redis, for all processes that use it.

    While Redis does not answer, requests are counted in this process (``local``), or those of keys with limits are
    rejected with 503 (``reject``).

    Args:
        lease_seconds: When a running request whose process did not end it is given up.
        wait_seconds: Time limit of Redis while it is fast.
        clock: Returns the seconds that count in place of the clocks of Redis and of this process.
    """

    def __init__(
        self,
        url: str,
        without_redis: Literal["local", "reject"],
        lease_seconds: float,
        wait_seconds: float = 0.25,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(clock or time.monotonic)
        self._url = url
        self._without_redis = without_redis
        self._lease_seconds = lease_seconds
        self._wait_seconds = wait_seconds
        self._servers: RedisServers | None = None
        self._redis_time: Callable[[], float | str] = clock or str  # "": Redis takes its own
        self._ended: defaultdict[str, list[str]] = defaultdict(list)  # requests that Redis may still count, by key
        self._open()

    async def take(self, caller: Caller) -> Release:
        """As in ``Quotas``; raises ``RequestError`` too where Redis does not answer."""
        rate, most = caller.requests_per_minute, caller.max_concurrent
        if caller.key_id is None or (rate is None and most is None):
            return _nothing
        request, name = secrets.token_hex(8), _PREFIX + caller.key_id
        ended = self._ended.pop(name, [])[-_MAX_ENDED:]
        arguments = (self._redis_time(), rate or 0, most or 0, self._lease_seconds, request, *ended)
        reply = await self._call("reading", name, lambda client: client.eval(_TAKE, 1, name, *arguments))
        if reply is None:
            self._ended[name] += ended if most is None else [*ended, request]
            if self._without_redis == "local":
                return await super().take(caller)
            raise RequestError(
                "the limits of this key cannot be checked now; try again later", code="quotas_unavailable"
            )
        outcome, number = (part.decode() for part in reply)
        if outcome == "running":
            raise _too_many_running(int(number), most)
        if outcome == "rate":
            raise _too_often(rate, float(number))
        return _nothing if most is None else partial(self._give_back, name, request)

    def close(self) -> None:
        """Close the connections to Redis; a later request opens them again."""
        servers, self._servers = self._servers, None
        if servers is not None:
            servers.close()

    def _open(self) -> RedisServers:
        if self._servers is None:
            self._servers = RedisServers("quotas", self._url, _PREFIX + "probe", self._wait_seconds)
        return self._servers

    async def _give_back(self, name: str, request: str) -> None:
        with anyio.CancelScope(shield=True):  # the client may be gone
            if await self._call("writing", name, lambda client: client.zrem(name, request)) is None:
                self._ended[name].append(request)

    async def _call(self, use: str, name: str, operation: Callable[[Any], Any]) -> Any:
        return await anyio.to_thread.run_sync(self._open().call, use, name, operation)


async def _nothing() -> None:
    """Release what was not counted."""
