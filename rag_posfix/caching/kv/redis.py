"""The tier in Redis, shared by every replica of a service. Any Redis from version 5 on will do; no modules.

An entry is one string under ``rag_posfix:passage:<key>``, written with one SET that carries its time to live. Tags are
kept as those of the answer cache are, under ``rag_posfix:passage-tag:<tag>``. ``rag_posfix:passage-index`` is a sorted
set of the keys, scored by their last use: it says what goes when the bound is reached. Sizes are asked of Redis: no
count is kept that could drift from what is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.kv.entry import EntryShape, PassageKV, read, write
from rag_posfix.caching.kv.packing import pack, unpack
from rag_posfix.caching.kv.readers import Readers
from rag_posfix.caching.redis_link import RedisLink
from rag_posfix.caching.redis_tags import add_tags, delete_names, drop_tag, names_of
from rag_posfix.caching.tier import Counters, TierStats
from rag_posfix.errors import CacheError

__all__ = ["RedisPassages"]

_ENTRY_PREFIX = "rag_posfix:passage:"
_TAG_PREFIX = "rag_posfix:passage-tag:"
_INDEX = "rag_posfix:passage-index"
_MIN_BYTES = 64 * 1024
BATCH_BYTES = 8 * 1024**2  # per round trip: much per wait, little to lose at the deadline
_BATCH_COMMANDS = 500
_SHARE = 32  # after so much of its bound a process measures again, and what it then frees to be ahead
_SETTLED_SECONDS = 60.0  # an indexed key without an entry is forgotten only then: it may be on its way
_Value = TypeVar("_Value")


class RedisPassages:
    """Keeps entries in Redis.

    Whatever happens to Redis, a search waits for it ``timeout_seconds`` at most, however many entries it asks for;
    what came until then is used.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis-cluster://`` or ``redis-sentinel://``.
        timeout_seconds: Bound of one search, or of writing 8 MiB, connecting included, > 0.
        max_bytes: Most bytes of all entries, >= 65536; least recently used ones go first. Each process that writes may
            exceed it by a thirty-second. An entry of more than a quarter is not sent. Redis's own ``maxmemory`` holds
            as well: a full Redis refuses or evicts, and is a miss.
        ttl_seconds: How long an entry is kept after it was written.
        compress: Whether entries are sent compressed.
        breaker: Decides when a failing Redis is asked again.
        clock: Seconds since 1970, the same for every process that shares the Redis.

    Raises:
        CacheError: The URL is not valid, or a bound is too small.
        ConfigError: redis-py is not installed.
    """

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
            url, timeout_seconds=timeout_seconds, counters=self._counters, breaker=breaker, cache="passage store"
        )
        self._max_bytes = max_bytes
        self._ttl = ttl_seconds
        self._compress = compress
        self._clock = clock
        self._readers = Readers()
        self._unmeasured: int | None = None  # bytes written since the entries were measured; None: never measured
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._link.label!r})"

    @property
    def name(self) -> str:
        """``redis``."""
        return "redis"

    @property
    def immediate(self) -> bool:
        """False: megabytes are hashed and sent."""
        return False

    def get_many(self, keys: Mapping[str, EntryShape]) -> dict[str, PassageKV]:
        """Return those of ``keys`` that are held and are as expected."""
        if self._closed or not keys:
            return {}
        replies: list[tuple[str, object]] = []
        over = threading.Event()

        def fetch(client: Any) -> None:
            for batch in _batches(keys, lambda shape: shape.n_bytes):
                if over.is_set():
                    return
                replies.extend(zip(batch, _fetch(client, list(batch), self._clock()), strict=True))

        self._link.read(fetch)
        over.set()
        received = [(key, reply) for key, reply in list(replies) if reply is not None]
        entries = self._readers.map(lambda item: self._opened(item[0], item[1], keys[item[0]]), received)
        found = {key: entry for (key, _), entry in zip(received, entries, strict=True) if entry is not None}
        if len(found) < len(received):
            # Damaged, or the replies to another request: do not use the connections again.
            self._counters.add("corrupt", len(received) - len(found))
            self._link.forget_connections()
        self._counters.add("hits", len(found))
        self._counters.add("misses", len(keys) - len(found))
        return found

    def put_many(self, entries: Mapping[str, PassageKV]) -> None:
        """Keep ``entries``, unless Redis refuses or has no time."""
        for batch in _batches(entries, lambda entry: entry.n_bytes):
            if self._closed or not self._put(batch):
                return

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Drop every entry with one of ``tags``; return how many there were."""
        return self._link.sweep(lambda client: sum(drop_tag(client, _TAG_PREFIX, tag, _ENTRY_PREFIX) for tag in tags))

    def clear(self) -> int:
        """Drop every passage of rag_posfix, and nothing else; return how many there were."""

        def drop(client: Any) -> int:
            count = delete_names(client, names_of(client, _ENTRY_PREFIX))
            delete_names(client, names_of(client, _TAG_PREFIX))
            client.delete(_INDEX)
            return count

        return self._link.sweep(drop)

    def stats(self) -> TierStats:
        """Return what the tier has done and holds. Cost: the size of each entry is asked of Redis, in few messages."""
        sizes = None if self._closed else self._link.read(_sizes)
        held = None if sizes is None else [size for _, _, size in sizes if size]
        return TierStats(
            name=self.name,
            hits=self._counters["hits"],
            misses=self._counters["misses"],
            errors=self._counters["errors"],
            corrupt=self._counters["corrupt"],
            evictions=self._counters["evictions"],
            entries=None if held is None else len(held),
            bytes=None if held is None else sum(held),
            available=self._link.available,
        )

    def close(self) -> None:
        """Close the connections and end the threads; every later ``get_many`` is a miss."""
        self._closed = True
        self._link.close()
        self._readers.close()

    def _opened(self, key: str, reply: object, expected: EntryShape) -> PassageKV | None:
        return read(key, unpack(reply, expected.most_bytes), expected)

    def _put(self, entries: Mapping[str, PassageKV]) -> bool:
        """Send ``entries``; return whether Redis took them."""
        data = {key: write(key, entry) for key, entry in entries.items()}
        if self._compress:
            data = {key: pack(content) for key, content in data.items()}
        data = {key: content for key, content in data.items() if len(content) <= self._max_bytes // 4}
        milliseconds, now = int(self._ttl * 1000), self._clock()

        def store(client: Any) -> bool:
            # Tags and index first: an entry without them could not be dropped or would not count.
            for key in data:
                add_tags(client, _TAG_PREFIX, key, entries[key].tags, now, self._ttl)
            pipeline = client.pipeline(transaction=False)
            pipeline.zadd(_INDEX, dict.fromkeys(data, now))
            pipeline.pexpire(_INDEX, milliseconds)
            for key, content in data.items():
                pipeline.set(_ENTRY_PREFIX + key, content, px=milliseconds)
            pipeline.execute()
            return True

        if data and not self._link.write(store):
            return False
        self._keep_the_bound(sum(map(len, data.values())))
        return True

    def _keep_the_bound(self, written: int) -> None:
        if self._unmeasured is not None and self._unmeasured + written < self._max_bytes // _SHARE:
            self._unmeasured += written
            return
        self._unmeasured = 0
        self._counters.add("evictions", self._link.sweep(self._evict))

    def _evict(self, client: Any) -> int:
        """Drop the least recently used entries where all together exceed the bound; return how many."""
        sizes, now = _sizes(client), self._clock()
        used = sum(size for _, _, size in sizes)
        unwanted, forgotten = [], []
        bound = self._max_bytes if used <= self._max_bytes else self._max_bytes - self._max_bytes // _SHARE
        for key, used_at, size in sizes:  # least recently used first
            if not size and used_at < now - _SETTLED_SECONDS:
                forgotten.append(key)
            elif size and used > bound:
                unwanted.append(key)
                used -= size
        count = delete_names(client, (_ENTRY_PREFIX.encode() + key for key in unwanted))
        gone = [*unwanted, *forgotten]
        for start in range(0, len(gone), _BATCH_COMMANDS):
            client.zrem(_INDEX, *gone[start : start + _BATCH_COMMANDS])
        return count


def _batches(items: Mapping[str, _Value], n_bytes: Callable[[_Value], int]) -> Iterator[dict[str, _Value]]:
    """Yield ``items`` in pieces of about ``BATCH_BYTES``."""
    batch: dict[str, _Value] = {}
    size = 0
    for key, value in items.items():
        if batch and size + n_bytes(value) > BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[key] = value
        size += n_bytes(value)
    if batch:
        yield batch


def _fetch(client: Any, keys: Sequence[str], now: float) -> list[object]:
    """Return what is under each key, in one round trip, and note that it was used."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.get(_ENTRY_PREFIX + key)
    pipeline.zadd(_INDEX, dict.fromkeys(keys, now), xx=True)
    # A Redis that is full or read-only refuses the note and still serves what it holds.
    replies: list[object] = pipeline.execute(raise_on_error=False)[: len(keys)]
    for reply in replies:
        if isinstance(reply, Exception) and not str(reply).startswith("WRONGTYPE"):
            raise reply
    return replies


def _sizes(client: Any) -> list[tuple[bytes, float, int]]:
    """Return key, time of last use and size of each entry, least recently used first; 0 for one that is gone."""
    indexed: list[tuple[bytes, float]] = client.zrange(_INDEX, 0, -1, withscores=True)
    sizes: list[int] = []
    for start in range(0, len(indexed), _BATCH_COMMANDS):
        pipeline = client.pipeline(transaction=False)
        for key, _ in indexed[start : start + _BATCH_COMMANDS]:
            pipeline.strlen(_ENTRY_PREFIX.encode() + key)
        replies = pipeline.execute(raise_on_error=False)  # a key of another type is nothing of ours
        sizes.extend(reply if isinstance(reply, int) else 0 for reply in replies)
    return [(key, used_at, size) for (key, used_at), size in zip(indexed, sizes, strict=True)]
