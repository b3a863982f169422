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
from contextlib import suppress
from typing import Any, Generic, TypeVar

from rag_posfix.caching.redis_client import RedisDeletedTags, RedisServers
from rag_posfix.caching.tier import CircuitBreaker, Codec, Counters, Guard, TierStats, V, map_in
from rag_posfix.errors import CacheError

_MIN_BYTES = 64 * 1024
_BATCH_BYTES = 8 * 1024**2  # per round trip: larger ones wait less often, smaller ones lose less at the deadline
_BATCH_COMMANDS = 500
_HEADROOM = 32  # 1/32 of the limit: after writing so much the entries are measured; eviction frees so much more
_WRITE_SECONDS = 60.0  # an indexed key without an entry may still be written for so long
_CLOCK_SKEW_SECONDS = 60.0
_DELETE_SECONDS = 10.0
INFO_SECONDS = 1.0
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
        url: As of ``redis_client``. In a cluster each server has a deadline and a circuit breaker of its own: while
            one is away, the others serve and take entries. Only the size limit is then not enforced, and without the
            server of the index no entry is taken.
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
    is_synchronous = False

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
        self._codec = codec
        self._max_bytes = max_bytes
        self._ttl = ttl_seconds
        self._clock = clock
        self._counters = Counters()
        self._deletions_guard = Guard(codec.cache)
        probe_key = codec.redis_prefix + "probe"
        self._servers = RedisServers(codec.cache, url, probe_key, timeout_seconds, self._counters, breaker)
        self.deleted_tags = RedisDeletedTags(codec.redis_deleted_tags, self, ttl_seconds)
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="rag-posfix-redis-reader")
        self._unmeasured: int | None = None  # bytes written since the entries were measured; None: never measured
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._servers.label!r})"

    def get_many(self, keys: Mapping[str, Any]) -> dict[str, V]:
        """Return the stored entries of ``keys``."""
        if self._closed or not keys:
            return {}
        names = {self._codec.redis_prefix + key: key for key in keys}
        index = [] if self._codec.redis_index is None else [self._codec.redis_index]
        replies: list[tuple[str, object]] = []
        deadline_passed = threading.Event()

        def fetch(client: Any, names_here: Sequence[str]) -> None:
            wanted = {names[name]: keys[names[name]] for name in names_here if name in names}
            has_index = bool(index) and index[0] in names_here
            elsewhere = keys.keys() - wanted.keys() if has_index else set()
            for number, batch in enumerate(_batches(wanted) if wanted else ({},)):
                if deadline_passed.is_set():
                    if number == 0:  # a Redis that was not asked must not count as one that answered
                        raise TimeoutError("the deadline passed before Redis was asked")
                    return
                used = [*batch, *elsewhere] if has_index else []
                replies.extend(zip(batch, self._fetch(client, list(batch), used), strict=True))
                elsewhere = set()

        self._servers.call_each("reading", [*names, *index], fetch)
        deadline_passed.set()
        in_time = list(replies)
        stored = [(key, reply) for key, reply in in_time if reply is not None]
        entries = map_in(self._readers, lambda item: self._codec.decode(*item, keys[item[0]]), stored)
        hits = {key: entry for (key, _), entry in zip(stored, entries, strict=True) if entry is not None}
        if len(hits) < len(stored):
            # Damaged, or the replies to another request: the connections must not be used again.
            self._counters.add("corrupt", len(stored) - len(hits))
            self._servers.disconnect()
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
            for names in _slices([self._codec.redis_tag_prefix + tag for tag in tags]):
                pipeline = client.pipeline(transaction=False)
                for name in names:
                    pipeline.zrange(name, 0, -1)
                for name, keys in zip(names, pipeline.execute(), strict=True):
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
        """Return the counts of the tier and, with an index, its content; None where that takes over a second.

        Cost: reads the size of each entry.
        """
        entries = n_bytes = None
        if self._codec.redis_index is not None and not self._closed and self._servers.available:
            # Not as a look-up: a large index takes longer than its deadline, and would open the circuit breaker.
            with suppress(Exception):
                stored = [size for _, _, size in self._servers.root.run(self._sizes, INFO_SECONDS) if size]
                entries, n_bytes = len(stored), sum(stored)
        return TierStats.counted(
            self.name, self._counters, entries=entries, n_bytes=n_bytes, available=self._servers.available
        )

    def close(self) -> None:
        """Close the connections and end the threads."""
        self._closed = True
        self._servers.close()
        self._readers.shutdown()

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def wait_seconds(self) -> float:
        """How long to wait for Redis, by its measured latency."""
        return self._servers.root.wait_seconds

    def call_deletions(self, operation: Callable[[Any], _T]) -> _T | None:
        """Call Redis for the deleted tags, in a second at most, also while the circuit breaker is open."""
        if self._closed:
            return None
        use = f"the set of deletions in {self._servers.label}"
        return self._deletions_guard.call(use, lambda: self._servers.root.run(operation, INFO_SECONDS), None)

    def _fetch(self, client: Any, keys: Sequence[str], used: Iterable[str]) -> list[object]:
        """Return the reply for each key, in one round trip, and record that the keys ``used`` were used."""
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(self._codec.redis_prefix + key)
        if used and self._codec.redis_index is not None:
            pipeline.zadd(self._codec.redis_index, dict.fromkeys(used, self._clock()), xx=True)
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
        if not data:
            return True
        index = self._codec.redis_index
        tagged: dict[str, dict[str, float]] = {}
        for key in data:
            for tag in entries[key].tags:
                tagged.setdefault(self._codec.redis_tag_prefix + tag, {})[key] = lifetimes[key]

        def add_tags(client: Any, names: Sequence[str]) -> None:
            indexed = data if index is not None and index in names else ()
            self._add_tags(client, {name: tagged[name] for name in names if name != index}, indexed, current_time)

        def store(client: Any, names: Sequence[str]) -> None:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                key = name.removeprefix(self._codec.redis_prefix)
                pipeline.set(name, data[key], px=int(lifetimes[key] * 1000))
            pipeline.execute()

        # Tags and index go first. An entry that is not in the index would not count; one without tags could not be
        # deleted early. Some tags are enough while a server of a cluster is away: deleted tags are compared too.
        needed = [*tagged, *([] if index is None else [index])]
        written = self._servers.call_each("writing", needed, add_tags, round_trips=2)
        if needed and (not written or (index is not None and index not in written)):
            return False
        if not self._servers.call_each("writing", (self._codec.redis_prefix + key for key in data), store):
            return False
        if index is not None:
            n_bytes = sum(map(len, data.values()))
            if self._unmeasured is not None and self._unmeasured + n_bytes < self._max_bytes // _HEADROOM:
                self._unmeasured += n_bytes
            else:
                self._unmeasured = 0
                self._counters.add("evictions", self._delete(self._evict))
        return True

    def _add_tags(
        self, client: Any, tagged: Mapping[str, Mapping[str, float]], indexed: Iterable[str], current_time: float
    ) -> None:
        """Add keys to the sets of tags, for their lifetimes in seconds by tag, and keys to the index."""
        pipeline = client.pipeline(transaction=False)
        for name, lifetimes in tagged.items():
            pipeline.zremrangebyscore(name, "-inf", current_time - _CLOCK_SKEW_SECONDS)
            pipeline.zadd(name, {key: current_time + lifetime for key, lifetime in lifetimes.items()})
            pipeline.ttl(name)
        if indexed:
            pipeline.zadd(self._codec.redis_index, dict.fromkeys(indexed, current_time))
            pipeline.pexpire(self._codec.redis_index, int(self._ttl * 1000))
        remaining = pipeline.execute()[2::3]
        # A tag must outlive each of its entries: EXPIRE may only set a later time. Its GT option needs Redis 7.
        for (name, lifetimes), left in zip(tagged.items(), remaining, strict=True):
            seconds = int(max(lifetimes.values()) + _CLOCK_SKEW_SECONDS) + 1
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
            count = self._servers.root.call("writing", operation, None, _DELETE_SECONDS)
            if count is not None:
                return count
        _logger.warning(
            "%s: %s could not drop entries; they stay until they expire", self._codec.cache, self._servers.label
        )
        return 0


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
