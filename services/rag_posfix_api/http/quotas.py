"""Quotas of API keys: in this process, or in Redis for all processes of a service.

In Redis the quotas of a key are one sorted set, changed by one script in one round trip. Its member ``rate`` has the
theoretical arrival time of the generic cell rate algorithm (ITU-T I.371) as its score, which is equal to the token
bucket of ``Quotas``; each running request is a member with the time at which it is given up, for a process may die.
Redis's own clock counts, the same for all processes.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import anyio
import anyio.to_thread

from rag_posfix.caching.redis_servers import RedisServers
from rag_posfix_api.http.auth import Caller
from rag_posfix_api.http.errors import QuotaError, QuotasUnavailableError

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


def _too_many_running(running: int, max_concurrent: int | None) -> QuotaError:
    return QuotaError(
        f"{running} requests of this key are running and {max_concurrent} are allowed; wait until one ends", 1
    )


def _too_often(rate: int | None, wait_seconds: float) -> QuotaError:
    seconds = max(1, math.ceil(wait_seconds))
    return QuotaError(f"this key may make {rate} requests a minute; try again in {seconds} seconds", seconds)


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
            QuotaError: a limit of the caller's key is reached.
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
        """As in ``Quotas``; raises ``QuotasUnavailableError`` too."""
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
            raise QuotasUnavailableError("the limits of this key cannot be checked now; try again later")
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
