"""The Redis tier, shared by every replica of a service. Needs Redis 5 or later and no modules.

An entry is one string, written with one SET that carries its time to live. A tag is one sorted set of the keys that
have it, scored by the time at which they expire; adding to a tag removes what has expired from it. If the tier has a
size limit, its index is a sorted set of the keys, scored by their last use: the first ones are evicted. Sizes are
read from Redis, because a count next to the entries could disagree with them. Every command names one key, as a
cluster demands.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, Generic, TypeVar

from rag_posfix.caching.deadline import AdaptiveDeadline, DeadlineRunner
from rag_posfix.caching.guard import CircuitBreaker, Counters, Guard
from rag_posfix.caching.redis_client import connection_pools, is_rejection, redis_target
from rag_posfix.caching.redis_deletions import RedisDeletions
from rag_posfix.caching.tier import Codec, TierStats, V, map_in
from rag_posfix.errors import CacheError

_MIN_BYTES = 64 * 1024
_BATCH_BYTES = 8 * 1024**2  # per round trip: larger ones wait less often, smaller ones lose less at the deadline
_BATCH_COMMANDS = 500
_HEADROOM = 32  # 1/32 of the limit: after writing so much the entries are measured; eviction frees so much more
_WRITE_SECONDS = 60.0  # an indexed key without an entry may still be written for so long
_CLOCK_SKEW_SECONDS = 60.0
_SLOWER = 10
_LONGEST_SECONDS = 1.0
_WRITE_ROUND_TRIPS = 3  # tags, the lifetime of tags, entries
_CONNECTIONS = 4
_COOLDOWN_SECONDS = (0.5, 5.0)
_DELETE_SECONDS = 10.0
_LOG_SECONDS = 1.0
_DELETE_ATTEMPTS = 3
_T = TypeVar("_T")
_Value = TypeVar("_Value")
_logger = logging.getLogger(__name__)


class RedisTier(Generic[V]):
    """Stores entries in Redis.

    If Redis is down, full, locked or replies with garbage, an operation takes ``timeout_seconds`` at most and is a
    miss. The circuit breaker then skips Redis, and a probe tries it again after its cool-down: half a second at first,
    five at most. A probe runs in a thread, on connections that stay open: no request waits for it. If Redis answers,
    but late (a busy machine or network), the deadline follows the measured latency, up to ten times
    ``timeout_seconds`` and to one second. The late answer closes the breaker if its latency is at most 3/4 of that
    limit; a slower Redis is not waited for. A search takes no longer for many entries; those that came before the
    deadline are used. A write to a slow Redis has three times as long: its tags take further round trips.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis-cluster://`` or ``redis-sentinel://``.
        codec: Serialises the entries, and names their keys.
        timeout_seconds: Limit of one search, or of writing 8 MiB, connecting included, > 0.
        max_bytes: Size limit of all entries if ``codec`` has an index, >= 65536; the least recently used are evicted
            first. Each process that writes may exceed it by 1/32. An entry larger than a quarter is not sent. Redis's
            own ``maxmemory`` holds as well: a full Redis rejects or evicts entries, which are then misses.
        ttl_seconds: Longest time to live, >= 1.
        clock: Seconds since 1970, the same for every process that shares the Redis.

    Raises:
        CacheError: The URL is not valid, or a limit is too small.
        ConfigError: redis-py is not installed.
    """

    name = "redis"
    immediate = False

    def __init__(
        self,
        url: str,
        codec: Codec[V],
        *,
        timeout_seconds: float = 0.25,
        max_bytes: int = 4 * 1024**3,
        ttl_seconds: float = 7 * 24 * 3600.0,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if timeout_seconds <= 0 or max_bytes < _MIN_BYTES or ttl_seconds < 1:
            raise CacheError(
                f"{codec.cache} in redis: timeout_seconds={timeout_seconds} must be above 0, e.g. 0.02, "
                f"max_bytes={max_bytes} must be >= {_MIN_BYTES} and ttl_seconds={ttl_seconds} must be >= 1; give no "
                "URL to have no such tier"
            )
        longest = max(timeout_seconds, min(_SLOWER * timeout_seconds, _LONGEST_SECONDS))
        self._target = redis_target(url, longest)
        self._codec = codec
        self._max_bytes = max_bytes
        self._ttl = ttl_seconds
        self._clock = clock
        self._counters = Counters()
        self._breaker = breaker or CircuitBreaker(*_COOLDOWN_SECONDS)
        self._guard = Guard(codec.cache, self._counters, self._breaker, is_rejection=is_rejection)
        self._reading, self._writing = f"reading {self._target.label}", f"writing {self._target.label}"
        self._timeout = timeout_seconds
        self._log_guard = Guard(codec.cache)
        self.deletions = RedisDeletions(codec.redis_deletions, self)
        self._deadline = AdaptiveDeadline(timeout_seconds, longest)
        self._runner = DeadlineRunner("rag-posfix-redis", _CONNECTIONS)
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="rag-posfix-redis-reader")
        self._client: Any = None
        self._last_probe: object = None
        self._client_lock = threading.Lock()
        self._unmeasured: int | None = None  # bytes written since the entries were measured; None: never measured
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._target.label!r})"

    def get_many(self, keys: Mapping[str, Any]) -> dict[str, V]:
        """Return the stored entries of ``keys``."""
        if self._closed or not keys:
            return {}
        replies: list[tuple[str, object]] = []
        deadline_passed = threading.Event()

        def fetch(client: Any) -> None:
            for batch in _batches(keys):
                if deadline_passed.is_set():
                    return
                replies.extend(zip(batch, self._fetch(client, list(batch)), strict=True))

        self._try(self._reading, fetch, None)
        deadline_passed.set()
        in_time = list(replies)
        stored = [(key, reply) for key, reply in in_time if reply is not None]
        entries = map_in(self._readers, lambda item: self._codec.decode(*item, keys[item[0]]), stored)
        hits = {key: entry for (key, _), entry in zip(stored, entries, strict=True) if entry is not None}
        if len(hits) < len(stored):
            # Damaged, or the replies to another request: the connections must not be used again.
            self._counters.add("corrupt", len(stored) - len(hits))
            self._disconnect(in_use=False)
        self._counters.add("hits", len(hits))
        self._counters.add("misses", len(in_time) - len(hits))
        return hits

    def put_many(self, entries: Mapping[str, V]) -> None:
        """Store ``entries``, unless Redis rejects them or is too slow."""
        for batch in _batches(entries):
            if self._closed or not self._put(batch):
                return

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were."""

        def delete(client: Any) -> int:
            count = 0
            for tag in tags:
                name = self._codec.redis_tag_prefix + tag
                keys = client.zrange(name, 0, -1)
                count += self._delete_entries(client, keys)
                # ZREM of these keys and not DEL of the tag: an entry that was added meanwhile keeps its tag.
                for batch in _slices(keys):
                    client.zrem(name, *batch)
            return count

        return self._delete(delete)

    def clear(self) -> int:
        """Delete every entry of this cache, and nothing else; return how many there were."""

        def delete(client: Any) -> int:
            prefix = self._codec.redis_prefix
            count = _delete(client, client.scan_iter(match=prefix + "*", count=_BATCH_COMMANDS))
            _delete(client, client.scan_iter(match=self._codec.redis_tag_prefix + "*", count=_BATCH_COMMANDS))
            if self._codec.redis_index is not None:
                client.delete(self._codec.redis_index)
            return count

        return self._delete(delete)

    def stats(self) -> TierStats:
        """Return the counts of the tier and, with an index, its content. Cost: reads the size of each entry."""
        entries = n_bytes = None
        if self._codec.redis_index is not None and not self._closed:
            sizes = self._try(self._reading, self._sizes, None)
            if sizes is not None:
                stored = [size for _, _, size in sizes if size]
                entries, n_bytes = len(stored), sum(stored)
        return TierStats.counted(
            self.name, self._counters, entries=entries, n_bytes=n_bytes, available=self._breaker.closed
        )

    def close(self) -> None:
        """Close the connections and end the threads."""
        self._closed = True
        self._disconnect(in_use=True)
        self._runner.close()
        self._readers.shutdown()
        with self._client_lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def wait_seconds(self) -> float:
        """How long to wait for Redis, by its measured latency."""
        return self._deadline.seconds

    def call_log(self, operation: Callable[[Any], _T]) -> _T | None:
        """Call Redis for the log of deletions, in a second at most, also while the circuit breaker is open."""
        if self._closed:
            return None

        def run() -> _T | None:
            return self._runner.run(lambda: operation(self._connect()), _LOG_SECONDS)

        return self._log_guard.call(f"the log of deletions in {self._target.label}", run, None)

    def _fetch(self, client: Any, keys: Sequence[str]) -> list[object]:
        """Return the reply for each key, in one round trip, and record that the keys were used."""
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(self._codec.redis_prefix + key)
        if self._codec.redis_index is not None:
            pipeline.zadd(self._codec.redis_index, dict.fromkeys(keys, self._clock()), xx=True)
        # A Redis that is full or read-only rejects the ZADD and still serves its entries.
        replies: list[object] = pipeline.execute(raise_on_error=False)[: len(keys)]
        for reply in replies:
            if isinstance(reply, Exception) and not str(reply).startswith("WRONGTYPE"):
                raise reply
        return replies

    def _put(self, entries: Mapping[str, V]) -> bool:
        """Send ``entries``; return whether Redis accepted them."""
        current_time = self._clock()
        lifetimes = {key: min(self._ttl, entry.expires_at - current_time) for key, entry in entries.items()}
        data = {
            key: b"".join(self._codec.encode(key, entry)) for key, entry in entries.items() if lifetimes[key] >= 0.001
        }
        data = {key: content for key, content in data.items() if len(content) <= self._max_bytes // 4}
        index = self._codec.redis_index

        def store(client: Any) -> bool:
            # Tags and index go first: an entry without them could not be deleted and would not count.
            for key in data:
                self._add_tags(client, key, entries[key].tags, current_time, lifetimes[key])
            pipeline = client.pipeline(transaction=False)
            if index is not None:
                pipeline.zadd(index, dict.fromkeys(data, current_time))
                pipeline.pexpire(index, int(self._ttl * 1000))
            for key, content in data.items():
                pipeline.set(self._codec.redis_prefix + key, content, px=int(lifetimes[key] * 1000))
            pipeline.execute()
            return True

        if data and not self._try(self._writing, store, False):
            return False
        if index is not None:
            written = sum(map(len, data.values()))
            if self._unmeasured is not None and self._unmeasured + written < self._max_bytes // _HEADROOM:
                self._unmeasured += written
            else:
                self._unmeasured = 0
                self._counters.add("evictions", self._delete(self._evict))
        return True

    def _add_tags(self, client: Any, key: str, tags: Sequence[str], current_time: float, lifetime: float) -> None:
        """Record that ``key`` has ``tags``, for ``lifetime`` seconds."""
        if not tags:
            return
        pipeline = client.pipeline(transaction=False)
        names = [self._codec.redis_tag_prefix + tag for tag in tags]
        for name in names:
            pipeline.zremrangebyscore(name, "-inf", current_time - _CLOCK_SKEW_SECONDS)
            pipeline.zadd(name, {key: current_time + lifetime})
            pipeline.ttl(name)
        remaining = pipeline.execute()[2::3]
        # A tag must outlive each of its entries: EXPIRE may only set a later time. Its GT option needs Redis 7.
        seconds = int(lifetime + _CLOCK_SKEW_SECONDS) + 1
        for name, left in zip(names, remaining, strict=True):
            if left < seconds - 1:
                pipeline.expire(name, seconds)
        pipeline.execute()

    def _evict(self, client: Any) -> int:
        """Delete the least recently used entries if all together exceed the limit; return how many."""
        sizes, current_time = self._sizes(client), self._clock()
        used = sum(size for _, _, size in sizes)
        evicted, expired = [], []
        limit = self._max_bytes if used <= self._max_bytes else self._max_bytes - self._max_bytes // _HEADROOM
        for key, used_at, size in sizes:  # least recently used first
            if not size and used_at < current_time - _WRITE_SECONDS:
                expired.append(key)
            elif size and used > limit:
                evicted.append(key)
                used -= size
        count = self._delete_entries(client, evicted)
        for batch in _slices([*evicted, *expired]):
            client.zrem(self._codec.redis_index, *batch)
        return count

    def _sizes(self, client: Any) -> list[tuple[bytes, float, int]]:
        """Return key, time of last use and size of each entry, least recently used first; size 0 if it is gone."""
        indexed: list[tuple[bytes, float]] = client.zrange(self._codec.redis_index, 0, -1, withscores=True)
        sizes: list[int] = []
        for batch in _slices(indexed):
            pipeline = client.pipeline(transaction=False)
            for key, _ in batch:
                pipeline.strlen(self._codec.redis_prefix.encode() + key)
            replies = pipeline.execute(raise_on_error=False)  # a key of another type is an error, and none of ours
            sizes.extend(reply if isinstance(reply, int) else 0 for reply in replies)
        return [(key, used_at, size) for (key, used_at), size in zip(indexed, sizes, strict=True)]

    def _delete_entries(self, client: Any, keys: Iterable[bytes]) -> int:
        return _delete(client, (self._codec.redis_prefix.encode() + key for key in keys))

    def _delete(self, operation: Callable[[Any], int]) -> int:
        """Return how many entries ``operation`` deleted, 0 if Redis fails.

        Deleting is rare and must not be lost: it has 10 seconds, three attempts, and ignores the circuit breaker.
        """
        for _ in range(_DELETE_ATTEMPTS):
            count = self._call(self._writing, operation, None, _DELETE_SECONDS, ignore_breaker=True)
            if count is not None:
                return count
        _logger.warning(
            "%s: %s could not drop entries; they stay until they expire", self._codec.cache, self._target.label
        )
        return 0

    def _try(self, use: str, operation: Callable[[Any], _T], default: _T) -> _T:
        """Call Redis within the deadline of now, and record the latency, also after the deadline.

        While the breaker is open, Redis is not called: a probe is started if it is time for one.
        """
        if not self._breaker.closed:
            if self._breaker.allow():
                if self._runner.is_full:  # all wait for a server that never finishes its replies
                    self._disconnect(in_use=True)
                self._last_probe = probe = object()
                self._runner.start(lambda: self._probe(probe))
            self._counters.add("skipped" if use == self._reading else "skipped_writes")
            return default
        started, seconds, round_trips = time.monotonic(), self._deadline.seconds, 1
        if use == self._writing and seconds > self._timeout:  # Redis is slow: its round trips count
            round_trips = _WRITE_ROUND_TRIPS
            seconds = min(round_trips * seconds, _LONGEST_SECONDS)

        def run(client: Any) -> _T:
            result = operation(client)
            latency = time.monotonic() - started
            self._deadline.record(latency / round_trips)
            if seconds < latency <= round_trips * self._deadline.usable_seconds:  # late, but Redis works
                self._breaker.success()
            return result

        return self._call(use, run, default, seconds)

    def _probe(self, probe: object) -> None:
        """Search, open further connections, and close the breaker if Redis is fast enough to be waited for.

        A probe that hung until a later one began reports nothing.
        """
        works = False
        try:
            client = self._connect()
            for _ in range(2):  # the first search may connect
                started = time.monotonic()
                self._fetch(client, ["probe"])
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
                self._guard.failed(self._reading, error)
        if probe is self._last_probe:
            (self._breaker.success if works else self._breaker.failure)()

    def _call(
        self, use: str, operation: Callable[[Any], _T], default: _T, seconds: float, *, ignore_breaker: bool = False
    ) -> _T:
        def run() -> _T:
            return self._runner.run(lambda: operation(self._connect()), seconds)

        return self._guard.call(use, run, default, ignore_breaker=ignore_breaker)

    def _connect(self) -> Any:
        with self._client_lock:
            if self._client is None:
                self._client = self._target.connect()
            return self._client

    def _disconnect(self, *, in_use: bool) -> None:
        if not self._client_lock.acquire(blocking=False):
            return  # another thread is connecting right now: there is nothing to disconnect
        try:
            for pool in connection_pools(self._client):
                pool.disconnect(inuse_connections=in_use)
        finally:
            self._client_lock.release()


def _batches(items: Mapping[str, _Value]) -> Iterator[dict[str, _Value]]:
    """Yield ``items`` in dictionaries of about ``_BATCH_BYTES``; an item without ``n_bytes`` counts nothing."""
    batch: dict[str, _Value] = {}
    size = 0
    for key, value in items.items():
        n_bytes = getattr(value, "n_bytes", 0)
        if batch and size + n_bytes > _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[key] = value
        size += n_bytes
    if batch:
        yield batch


def _slices(items: Sequence[_Value]) -> Iterator[Sequence[_Value]]:
    return (items[start : start + _BATCH_COMMANDS] for start in range(0, len(items), _BATCH_COMMANDS))


def _delete(client: Any, names: Iterable[bytes]) -> int:
    count, pipeline = 0, client.pipeline(transaction=False)
    for name in names:
        pipeline.delete(name)
        if len(pipeline) >= _BATCH_COMMANDS:
            count += int(sum(pipeline.execute()))
    return count + int(sum(pipeline.execute()))
