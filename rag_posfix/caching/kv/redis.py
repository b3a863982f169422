"""The Redis tier of the passage KV store, shared by every replica of a service. Needs Redis 5 or later and no modules.

An entry is one string under ``rag_posfix:passage:<key>``, written with one SET that carries its time to live. A tag is
one sorted set under ``rag_posfix:passage-tag:<tag>``. ``rag_posfix:passage-index`` is a sorted set of the keys, scored
by their last use: the first ones go when the bound is reached. Sizes are asked of Redis, because a count kept beside
the entries could disagree with them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rag_posfix.caching.backends import Locality
from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.kv.compression import compress, decompress
from rag_posfix.caching.kv.entry import EntryShape, PassageKV, deserialize, serialize
from rag_posfix.caching.kv.reader_pool import ReaderPool
from rag_posfix.caching.kv.tier import KV_BACKENDS, PASSAGE_STORE, PassageStoreOptions
from rag_posfix.caching.redis_keyspace import RedisKeyspace
from rag_posfix.caching.redis_link import RedisLink
from rag_posfix.caching.tier import Counters, TierStats
from rag_posfix.errors import CacheError

_KEYSPACE = RedisKeyspace(entry_prefix="rag_posfix:passage:", tag_prefix="rag_posfix:passage-tag:")
_INDEX = "rag_posfix:passage-index"
_MIN_BYTES = 64 * 1024
_BATCH_BYTES = 8 * 1024**2  # per round trip: larger ones wait less often, smaller ones lose less at the deadline
_BATCH_COMMANDS = 500
_HEADROOM = 32  # 1/32 of the bound: after writing so much the entries are measured; eviction frees so much more
_WRITE_SECONDS = 60.0  # an indexed key without an entry may still be written for so long
_Value = TypeVar("_Value")


class RedisPassages:
    """Keeps entries in Redis. A failing Redis costs a search ``timeout_seconds`` at most; see ``RedisLink``.

    A search takes no longer however many entries it asks for; those that came before the deadline are used.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis-cluster://`` or ``redis-sentinel://``.
        timeout_seconds: Bound of one search, or of writing 8 MiB, connecting included, > 0.
        max_bytes: Most bytes of all entries, >= 65536; the least recently used go first. Each process that writes may
            exceed it by 1/32. An entry of more than a quarter is not sent. Redis's own ``maxmemory`` holds as well: a
            full Redis refuses or evicts entries, which are then misses.
        ttl_seconds: How long an entry is kept after it was written.
        compress: Whether entries are sent compressed.
        clock: Seconds since 1970, the same for every process that shares the Redis.

    Raises:
        CacheError: The URL is not valid, or a bound is too small.
        ConfigError: redis-py is not installed.
    """

    name = "redis"
    immediate = False  # megabytes are hashed and sent

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 0.25,
        max_bytes: int = 4 * 1024**3,
        ttl_seconds: float = 7 * 24 * 3600.0,
        compress: bool = False,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < _MIN_BYTES or ttl_seconds < 1:
            raise CacheError(
                f"passages in redis: max_bytes={max_bytes} must be >= {_MIN_BYTES} and ttl_seconds={ttl_seconds} "
                "must be >= 1; give no URL to have no such tier"
            )
        self._counters = Counters()
        self._link = RedisLink(
            url, timeout_seconds=timeout_seconds, cache=PASSAGE_STORE, counters=self._counters, breaker=breaker
        )
        self._max_bytes = max_bytes
        self._ttl = ttl_seconds
        self._compress = compress
        self._clock = clock
        self._readers = ReaderPool()
        self._unmeasured: int | None = None  # bytes written since the entries were measured; None: never measured
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._link.label!r})"

    def get_many(self, keys: Mapping[str, EntryShape]) -> dict[str, PassageKV]:
        """Return the entries of those of ``keys`` that are held and have the expected shape and dtype."""
        if self._closed or not keys:
            return {}
        replies: list[tuple[str, object]] = []
        deadline_passed = threading.Event()

        def fetch(client: Any) -> None:
            for batch in _batches(keys, lambda shape: shape.n_bytes):
                if deadline_passed.is_set():
                    return
                replies.extend(zip(batch, _fetch(client, list(batch), self._clock()), strict=True))

        self._link.read(fetch)
        deadline_passed.set()
        received = [(key, reply) for key, reply in list(replies) if reply is not None]
        entries = self._readers.map(lambda item: _deserialized(item[0], item[1], keys[item[0]]), received)
        found = {key: entry for (key, _), entry in zip(received, entries, strict=True) if entry is not None}
        if len(found) < len(received):
            # Damaged, or the replies to another request: the connections must not be used again.
            self._counters.add("corrupt", len(received) - len(found))
            self._link.discard_idle_connections()
        self._counters.add("hits", len(found))
        self._counters.add("misses", len(keys) - len(found))
        return found

    def put_many(self, entries: Mapping[str, PassageKV]) -> None:
        """Keep ``entries``, unless Redis refuses or is too slow."""
        for batch in _batches(entries, lambda entry: entry.n_bytes):
            if self._closed or not self._put(batch):
                return

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were."""
        return self._link.delete(lambda client: _KEYSPACE.delete_tags(client, tags))

    def clear(self) -> int:
        """Delete every passage of rag_posfix, and nothing else; return how many there were."""

        def delete(client: Any) -> int:
            count = _KEYSPACE.clear(client)
            client.delete(_INDEX)
            return count

        return self._link.delete(delete)

    def stats(self) -> TierStats:
        """Return what the tier has done and holds. Cost: the size of each entry is asked of Redis, 500 at a time."""
        sizes = None if self._closed else self._link.read(_sizes)
        held = None if sizes is None else [size for _, _, size in sizes if size]
        return TierStats.counted(
            self.name,
            self._counters,
            entries=None if held is None else len(held),
            n_bytes=None if held is None else sum(held),
            available=self._link.available,
        )

    def close(self) -> None:
        """Close the connections and end the threads; every later ``get_many`` is a miss."""
        self._closed = True
        self._link.close()
        self._readers.close()

    def _put(self, entries: Mapping[str, PassageKV]) -> bool:
        """Send ``entries``; return whether Redis accepted them."""
        data = {key: serialize(key, entry) for key, entry in entries.items()}
        if self._compress:
            data = {key: compress(content) for key, content in data.items()}
        data = {key: content for key, content in data.items() if len(content) <= self._max_bytes // 4}
        milliseconds, now = int(self._ttl * 1000), self._clock()

        def store(client: Any) -> bool:
            # Tags and index go first: an entry without them could not be deleted and would not count.
            for key in data:
                _KEYSPACE.add_tags(client, key, entries[key].tags, now, self._ttl)
            pipeline = client.pipeline(transaction=False)
            pipeline.zadd(_INDEX, dict.fromkeys(data, now))
            pipeline.pexpire(_INDEX, milliseconds)
            for key, content in data.items():
                pipeline.set(_KEYSPACE.entry(key), content, px=milliseconds)
            pipeline.execute()
            return True

        if data and not self._link.write(store):
            return False
        self._enforce_bound(sum(map(len, data.values())))
        return True

    def _enforce_bound(self, written: int) -> None:
        """Measure and evict, if enough was written since the last time. ``written``: bytes written just now."""
        if self._unmeasured is not None and self._unmeasured + written < self._max_bytes // _HEADROOM:
            self._unmeasured += written
            return
        self._unmeasured = 0
        self._counters.add("evictions", self._link.delete(self._evict))

    def _evict(self, client: Any) -> int:
        """Delete the least recently used entries if all together exceed the bound; return how many."""
        sizes, now = _sizes(client), self._clock()
        used = sum(size for _, _, size in sizes)
        evicted, expired = [], []
        bound = self._max_bytes if used <= self._max_bytes else self._max_bytes - self._max_bytes // _HEADROOM
        for key, used_at, size in sizes:  # least recently used first
            if not size and used_at < now - _WRITE_SECONDS:
                expired.append(key)
            elif size and used > bound:
                evicted.append(key)
                used -= size
        count = _KEYSPACE.delete(client, evicted)
        gone = [*evicted, *expired]
        for start in range(0, len(gone), _BATCH_COMMANDS):
            client.zrem(_INDEX, *gone[start : start + _BATCH_COMMANDS])
        return count


def _deserialized(key: str, reply: object, expected: EntryShape) -> PassageKV | None:
    return deserialize(key, decompress(reply, expected.max_serialized_bytes), expected)


def _batches(items: Mapping[str, _Value], n_bytes: Callable[[_Value], int]) -> Iterator[dict[str, _Value]]:
    """Yield ``items`` in dictionaries of about ``_BATCH_BYTES``."""
    batch: dict[str, _Value] = {}
    size = 0
    for key, value in items.items():
        if batch and size + n_bytes(value) > _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[key] = value
        size += n_bytes(value)
    if batch:
        yield batch


def _fetch(client: Any, keys: Sequence[str], now: float) -> list[object]:
    """Return the reply for each key, in one round trip, and record that the keys were used."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.get(_KEYSPACE.entry(key))
    pipeline.zadd(_INDEX, dict.fromkeys(keys, now), xx=True)
    # A Redis that is full or read-only refuses the ZADD and still serves its entries.
    replies: list[object] = pipeline.execute(raise_on_error=False)[: len(keys)]
    for reply in replies:
        if isinstance(reply, Exception) and not str(reply).startswith("WRONGTYPE"):
            raise reply
    return replies


def _sizes(client: Any) -> list[tuple[bytes, float, int]]:
    """Return key, time of last use and size of each entry, least recently used first; size 0 if it is gone."""
    indexed: list[tuple[bytes, float]] = client.zrange(_INDEX, 0, -1, withscores=True)
    sizes: list[int] = []
    for start in range(0, len(indexed), _BATCH_COMMANDS):
        pipeline = client.pipeline(transaction=False)
        for key, _ in indexed[start : start + _BATCH_COMMANDS]:
            pipeline.strlen(_KEYSPACE.entry_prefix.encode() + key)
        replies = pipeline.execute(raise_on_error=False)  # a key of another type is an error, and none of ours
        sizes.extend(reply if isinstance(reply, int) else 0 for reply in replies)
    return [(key, used_at, size) for (key, used_at), size in zip(indexed, sizes, strict=True)]


@KV_BACKENDS.register(RedisPassages.name, Locality.NETWORK)
def _open(settings: PassageStoreOptions, _: Path) -> RedisPassages | None:
    if settings.redis_url is None:
        return None
    return RedisPassages(
        settings.redis_url.get_secret_value(),
        timeout_seconds=settings.redis_timeout_seconds,
        max_bytes=settings.redis_bytes,
        ttl_seconds=settings.redis_ttl_seconds,
        compress=settings.compress,
    )
