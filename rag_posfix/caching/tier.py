"""Tiers of a cache: interfaces of tiers, entries and codecs, and a cache that looks entries up in several tiers.

Runs an operation in another thread and stops waiting for it at a deadline, which may follow the latency.

A socket timeout limits each read, not a whole operation. A slow name server, a handshake of several round trips, or a
server that sends one byte at a time take longer. A caller can stop waiting for a thread instead.

Calls to stores that may fail: a failure is counted, logged once and replaced by a default, never raised.

The memory tier: entries as objects, with a size limit; the least recently used entry is evicted first.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Generic, Protocol, TypeVar

from rag_posfix.caching.deletions import EVERYTHING, Computation, DeletedTags, SharedTags
from rag_posfix.contracts.method_spec import parse_method
from rag_posfix.errors import CacheError
from rag_posfix.registry import Registry

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class Counters:
    """Named counts that several threads may add to."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]


class CircuitBreaker:
    """Decides whether a store may be used.

    Closed: every caller may use the store. A failure opens the breaker: no caller may use the store until the end of
    the cool-down. Then it is half-open: one caller at a time may try. A success closes it; another failure doubles the
    cool-down, up to ``max_cooldown_seconds``.
    """

    def __init__(
        self,
        cooldown_seconds: float = 5.0,
        max_cooldown_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < cooldown_seconds <= max_cooldown_seconds:
            raise CacheError(
                f"circuit breaker: cooldown_seconds={cooldown_seconds} must be above 0 and at most "
                f"max_cooldown_seconds={max_cooldown_seconds}"
            )
        self._first_cooldown = cooldown_seconds
        self._max_cooldown = max_cooldown_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._cooldown = cooldown_seconds
        self._retry_at: float | None = None  # None: closed
        self._trying = False

    @property
    def closed(self) -> bool:
        with self._lock:
            return self._retry_at is None

    def allow(self) -> bool:
        """Return whether the caller may use the store now; it must then report ``success`` or ``failure``."""
        with self._lock:
            if self._retry_at is None:
                return True
            current_time = self._clock()
            if current_time < self._retry_at:
                return False
            # The trial is a lease: if its caller never reports, another one follows after a cool-down.
            self._retry_at = current_time + self._cooldown
            self._trying = True
            return True

    def success(self) -> None:
        with self._lock:
            self._retry_at = None
            self._trying = False
            self._cooldown = self._first_cooldown

    def failure(self) -> None:
        with self._lock:
            if self._retry_at is None:
                self._cooldown = self._first_cooldown
            elif self._trying:
                self._cooldown = min(2 * self._cooldown, self._max_cooldown)
            else:  # the call began before the first failure was reported: the same outage, not a longer one
                return
            self._trying = False
            self._retry_at = self._clock() + self._cooldown


class Guard:
    """Calls a store, skips it while its circuit breaker is open, and logs the start and the end of an outage.

    Each use of the store ("reading redis://host:6379/0") has its own line in the log: a full store rejects every write
    and serves every read, and a shared state would log a line for each request.

    Args:
        cache: The cache that the store belongs to, for the log.
        counters: Counts failures as ``errors`` and skipped reads as ``skipped``.
        breaker: None never skips the store.
        errors: Exceptions that mean that the store failed; others are raised.
        is_rejection: Whether a failure means that the store works and rejects this operation, for example because it
            is full or read-only. The breaker then stays closed.
    """

    def __init__(
        self,
        cache: str,
        counters: Counters | None = None,
        breaker: CircuitBreaker | None = None,
        errors: tuple[type[Exception], ...] = (Exception,),
        is_rejection: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        self._cache = cache
        self._counters = counters or Counters()
        self._breaker = breaker
        self._errors = errors
        self._is_rejection = is_rejection
        self._failing: set[str] = set()
        self._lock = threading.Lock()

    def call(self, use: str, operation: Callable[[], _T], default: _T, *, ignore_breaker: bool = False) -> _T:
        """Return what ``operation`` returns, or ``default`` if it fails or the circuit breaker is open."""
        if self._breaker is not None and not (self._breaker.allow() or ignore_breaker):
            self._counters.add("skipped" if use.startswith("reading") else "skipped_writes")
            return default
        try:
            result = operation()
        except self._errors as error:
            self.failed(use, error)
            if self._breaker is not None:
                (self._breaker.success if self._is_rejection(error) else self._breaker.failure)()
            return default
        if self._breaker is not None:
            self._breaker.success()
        self.worked(use)
        return result

    def failed(self, use: str, error: BaseException) -> None:
        """Report a failure. Only the type of the error is logged, because its text may quote stored values."""
        self._counters.add("errors")
        with self._lock:
            is_new = use not in self._failing
            self._failing.add(use)
        if is_new:
            _logger.warning("%s: %s is failing (%s); answering without it", self._cache, use, type(error).__name__)

    def worked(self, use: str) -> None:
        """Report a success."""
        with self._lock:
            was_failing = use in self._failing
            self._failing.discard(use)
        if was_failing:
            _logger.warning("%s: %s works again", self._cache, use)


_Item = TypeVar("_Item")


class Entry(Protocol):
    """What a tier stores under a key."""

    @property
    def n_bytes(self) -> int: ...

    @property
    def tags(self) -> tuple[str, ...]:
        """The entry can be deleted by each of them."""
        ...

    @property
    def expires_at(self) -> float:
        """Seconds since 1970; infinity for no limit."""
        ...

    def fits(self, expected: Any) -> bool:
        """Whether the entry has the ``expected`` shape and type."""
        ...


V = TypeVar("V", bound=Entry)


class Codec(Protocol[V]):
    """Serialises the entries of one cache, with a checksum over key and content, and names where they are stored."""

    cache: str
    """The cache, for logs and errors."""
    file_name: str
    """SQLite file of the disk tier."""
    redis_prefix: str
    redis_tag_prefix: str
    redis_index: str | None
    """Sorted set of the keys in Redis by their last use, for a size limit; None for no limit of our own."""
    redis_deleted_tags: str
    """Sorted set of the deleted tags in Redis."""

    def encode(self, key: str, entry: V) -> Sequence[bytes | memoryview]:
        """Return the serialised entry in parts, one after the other."""
        ...

    def decode(self, key: str, data: object, expected: Any) -> V | None:
        """Return the entry in ``data``; None if it is damaged, of another key or not as ``expected``."""
        ...

    def allocate(self, n_bytes: int) -> memoryview:
        """Return memory to read a serialised entry into."""
        ...


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of a tier since its creation.

    Attributes:
        name: Name of the tier: ``memory``, ``disk``, ``redis``.
        hits: Number of keys with an entry.
        misses: Number of requested keys without an entry.
        errors: Number of operations that failed.
        skipped: Number of look-ups that were not made, because the circuit breaker was open.
        corrupt: Number of damaged entries; each was a miss.
        evictions: Number of entries that were removed to keep the size limit.
        entries: Number of entries, or None if counting is expensive.
        bytes: Size of the entries, or None likewise.
        available: False while the tier is failing and its circuit breaker is open.
    """

    name: str
    hits: int = 0
    misses: int = 0
    errors: int = 0
    skipped: int = 0
    corrupt: int = 0
    evictions: int = 0
    entries: int | None = None
    bytes: int | None = None
    available: bool = True

    @classmethod
    def counted(
        cls,
        name: str,
        counters: Counters,
        *,
        entries: int | None = None,
        n_bytes: int | None = None,
        available: bool = True,
    ) -> TierStats:
        """Return the statistics of a tier that counts under the names of the fields above."""
        names = ("hits", "misses", "errors", "skipped", "corrupt", "evictions")
        counts = {count: counters[count] for count in names}
        return cls(name, **counts, entries=entries, bytes=n_bytes, available=available)


class Tier(Protocol[V]):
    """One level of a cache, such as memory or disk. Several threads may use it at once.

    A tier handles its own failures: reading is then a miss, writing does nothing, and both are counted.
    """

    @property
    def name(self) -> str:
        """Name of the tier, for logs and statistics."""
        ...

    @property
    def is_synchronous(self) -> bool:
        """Whether writing takes almost no time. The passage KV store writes other tiers in the background."""
        ...

    def get_many(self, keys: Mapping[str, Any]) -> dict[str, V]:
        """Return the stored entries of ``keys``, without damaged and unexpected ones.

        Args:
            keys: For each key what ``fits`` and the codec compare an entry with; None in the answer cache.
        """
        ...

    def put_many(self, entries: Mapping[str, V]) -> None:
        """Store ``entries`` with their tags."""
        ...

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were."""
        ...

    def clear(self) -> int:
        """Delete every entry; return how many there were."""
        ...

    def stats(self) -> TierStats:
        """Return what the tier has done and holds."""
        ...

    def close(self) -> None:
        """Release files, sockets and threads. Every later read is a miss and every later write does nothing."""
        ...


TIERS: Registry[Any] = Registry("cache backend", parts=("codec",))
"""Tiers of plug-ins by name: dataclasses with a field ``codec`` and their parameters."""


def plugin_tier(text: str, codec: Codec[V]) -> Tier[V]:
    """Return the tier of a plug-in, from ``name`` or ``name:parameter=value``.

    Raises:
        UnknownNameError: no plug-in has a tier of this name.
        ConfigError: an unknown parameter, or a value outside of its range.
    """
    tier: Tier[V] = TIERS.create(parse_method(text, "cache backend", "seconds=60"), {"codec": lambda: codec})
    return tier


class TieredCache(Generic[V]):
    """Looks entries up in tiers, fastest first, and copies a hit to the tiers before it.

    Tiers handle the failures of their stores; an exception that a tier does not foresee is logged once and is a miss.

    Raises:
        CacheError: ``tiers`` is empty.
    """

    def __init__(
        self,
        tiers: Sequence[Tier[V]],
        cache: str,
        *,
        lifetime_seconds: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not tiers:
            raise CacheError(f"{cache}: needs at least one tier; pass None in place of the cache to have none")
        self._tiers = tuple(tiers)
        self._guard = Guard(cache)
        self._first_is_synchronous = self._call(tiers[0], lambda tier: tier.is_synchronous, False)
        found = {tier.name: self._call(tier, lambda tier: getattr(tier, "deleted_tags", None), None) for tier in tiers}
        shared = {name: tags for name, tags in found.items() if isinstance(tags, SharedTags)}
        self._shared = frozenset(shared)
        self._deletions = DeletedTags(
            cache,
            self._erase,
            next(iter(shared.values()), None),
            lifetime_seconds=lifetime_seconds,
            clock=clock,
        )

    def tier_stats(self) -> list[dict[str, Any]]:
        """Return the statistics of each tier as plain data, or only its name if it raises."""
        stats = [(tier.name, self._call(tier, lambda tier: tier.stats(), None)) for tier in self._tiers]
        return [{"name": name} if counts is None else asdict(counts) for name, counts in stats]

    def begin(self) -> Computation:
        """Open a computation: entries of tags that are deleted from now on are not stored while it is referred to."""
        return self._deletions.begin()

    @property
    def pending_deletions(self) -> int:
        """Deleted tags of which other processes may have copies: Redis fails, or had them for less than a second."""
        return self._deletions.pending

    def flush_deletions(self, timeout_seconds: float) -> bool:
        """Wait until no deletion is pending; return False after the timeout."""
        return self._deletions.flush(timeout_seconds)

    def close(self) -> None:
        """Close every tier; later calls are misses."""
        self._deletions.close()
        for tier in self._tiers:
            self._call(tier, lambda tier: tier.close(), None)

    def _call(self, tier: Tier[V], operation: Callable[[Tier[V]], _T], default: _T) -> _T:
        return self._guard.call(f"the {tier.name} tier", lambda: operation(tier), default)

    def _get(self, tier: Tier[V], keys: Mapping[str, Any]) -> dict[str, V]:
        return self._call(tier, lambda tier: tier.get_many(keys), {})

    def _search(
        self, keys: Mapping[str, Any], accept: Callable[[dict[str, V]], dict[str, V]], *, is_synchronous: bool = False
    ) -> dict[str, V]:
        """Return the entries that ``accept`` accepts; a tier is searched for the keys that earlier tiers lack.

        With ``is_synchronous`` only synchronous tiers are searched.
        """
        hits: dict[str, V] = {}
        searches: list[Computation] = []  # what is deleted during the search is neither copied nor returned
        missing = dict(keys)
        for index, tier in enumerate(self._tiers):
            if not missing:
                break
            if is_synchronous and not tier.is_synchronous:
                continue
            may_be_late = index or not self._first_is_synchronous
            if may_be_late:
                self._deletions.wait_for_reading()
                searches.append(self.begin())
            entries = accept(self._get(tier, missing))
            if entries and may_be_late:
                entries = self._deletions.surviving(entries)
                self._put(entries, index)
            hits.update(entries)
            missing = {key: expected for key, expected in missing.items() if key not in entries}
        return hits

    def _put(self, entries: dict[str, V], n_tiers: int) -> None:
        """Write ``entries`` to the first ``n_tiers`` tiers."""
        self._write_tiers(entries, self._tiers[:n_tiers])

    def _write_tiers(self, entries: dict[str, V], tiers: Sequence[Tier[V]]) -> None:
        """Write ``entries`` that were not deleted, and erase those that are deleted during that."""
        with self.begin():
            entries = self._deletions.surviving(entries)
            for tier in tiers:
                self._call(tier, lambda tier: tier.put_many(self._accepted(tier.name, entries)), None)
            if deleted := self._deletions.of(entries):
                self._erase_from(tiers, list({tag for tags in deleted.values() for tag in tags}))

    def _accepted(self, tier: str, entries: dict[str, V]) -> dict[str, V]:
        """Return the entries that a tier gets."""
        return entries

    def _delete_tags(self, tags: Sequence[str]) -> int:
        """Delete the entries of ``tags`` here and in other processes; return the largest count of a tier."""
        return self._deletions.delete(tags)

    def _erase(self, tags: Sequence[str], from_shared: bool = True) -> int:
        """Erase the entries of ``tags`` here; from the tiers that processes share as well if ``from_shared``."""
        tiers = [tier for tier in self._tiers if from_shared or tier.name not in self._shared]
        return self._erase_from(tiers, tags)

    def _erase_from(self, tiers: Sequence[Tier[V]], tags: Sequence[str]) -> int:
        """Erase the entries of ``tags`` from tiers, the slowest first; return the largest count of a tier."""

        def erase(tier: Tier[V]) -> int:
            return tier.clear() if EVERYTHING in tags else tier.delete_tags(tags)

        return max((self._call(tier, erase, 0) for tier in reversed(tiers)), default=0)


def map_in(pool: ThreadPoolExecutor, function: Callable[[_Item], _T], items: Sequence[_Item]) -> list[_T]:
    """Apply ``function`` to several items at once: hashing and reading files release the GIL."""
    return [function(item) for item in items] if len(items) < 2 else list(pool.map(function, items))


_JOIN_SECONDS = 0.2


class DeadlineRunner:
    """A few threads for operations that may hang. They are daemons, so that a hanging one cannot keep a process alive.

    Args:
        name: Prefix of the threads' names.
        max_threads: Most operations at once, hanging ones included; further ones wait until a thread is free.
    """

    def __init__(self, name: str, max_threads: int = 4) -> None:
        self._name = name
        self._max_threads = max_threads
        self._lock = threading.Lock()
        self._closed = False
        self._reset()

    def run(self, operation: Callable[[], _T], seconds: float) -> _T:
        """Return what ``operation`` returns.

        Raises:
            TimeoutError: It did not finish within ``seconds``. It continues in its thread and its result is discarded;
                if it has not begun, it never will.
        """
        future = self.start(operation)
        try:
            return future.result(min(seconds, threading.TIMEOUT_MAX))  # more is an OverflowError
        finally:
            future.cancel()

    def start(self, operation: Callable[[], _T]) -> Future[_T]:
        """Run ``operation`` without waiting for it."""
        future: Future[_T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._pid != os.getpid():  # threads do not survive a fork
                self._reset()
            self._tasks.put((future, operation))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._max_threads:
                self._start_thread()
        return future

    @property
    def running(self) -> int:
        """How many operations are running, including those past their deadline."""
        with self._lock:
            return self._running

    @property
    def is_full(self) -> bool:
        """Whether all threads are running an operation: another one would wait."""
        return self.running >= self._max_threads

    def close(self) -> None:
        """End the threads that are not hanging."""
        with self._lock:
            self._closed = True
            threads = self._threads if self._pid == os.getpid() else []
            for _ in threads:
                self._tasks.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._running = 0

    def _start_thread(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, args=(self._tasks, self._idle), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(
        self,
        tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None],
        idle: threading.Semaphore,
    ) -> None:
        while (task := tasks.get()) is not None:
            future, operation = task
            if future.set_running_or_notify_cancel():
                self._add_running(1)
                try:
                    result = operation()
                except BaseException as error:
                    self._add_running(-1)
                    future.set_exception(error)
                else:
                    self._add_running(-1)
                    future.set_result(result)
                    del result
            del task, future, operation  # a result must not stay in memory until the next task
            if tasks.empty():  # otherwise the next task was already counted on this thread
                idle.release()

    def _add_running(self, count: int) -> None:
        with self._lock:
            self._running += count


class AdaptiveDeadline:
    """How long to wait for a store, between two limits; longer where the store, the network or this machine is busy.

    Formula: the retransmission timeout of TCP (RFC 6298, section 2): smoothed latency + 4 x smoothed deviation, with
    weights 1/8 and 1/4, and at least twice the smoothed latency: the deviation of a constant latency goes to 0, and
    the next answer that is a little late would miss its deadline. A store that never answers gives no latency, so that
    the deadline for a dead store stays where it is.

    Attributes:
        usable_seconds: Latency up to which waiting for the store is worth it: 3/4 of ``longest_seconds``.
    """

    def __init__(self, shortest_seconds: float, longest_seconds: float) -> None:
        self._shortest = shortest_seconds
        self._longest = longest_seconds
        self.usable_seconds = 0.75 * longest_seconds
        self._lock = threading.Lock()
        self._latency: float | None = None
        self._deviation = 0.0

    @property
    def seconds(self) -> float:
        with self._lock:
            timeout = 0.0 if self._latency is None else self._latency + max(4 * self._deviation, self._latency)
        return min(max(timeout, self._shortest), self._longest)

    def record(self, latency_seconds: float) -> None:
        """Take the latency of an operation that succeeded, in time or late."""
        with self._lock:
            if self._latency is None:
                self._latency, self._deviation = latency_seconds, latency_seconds / 2
                return
            self._deviation += (abs(self._latency - latency_seconds) - self._deviation) / 4
            self._latency += (latency_seconds - self._latency) / 8


_MIN_BYTES = 4096
_OVERHEAD_BYTES = 1024  # the key, the tags and the Python objects around an entry, roughly


class MemoryTier(Generic[V]):
    """Stores entries in this process; tensors stay on their device.

    Args:
        max_bytes: Size limit in bytes, >= 4096; each entry counts 1 KiB more than its size. A larger entry is not
            stored.
        max_entries: Maximum number of entries, >= 1; None for no limit.
        clock: Seconds since 1970.

    Raises:
        CacheError: A limit is too small.
    """

    name = "memory"
    is_synchronous = True  # only a reference is stored

    def __init__(
        self, max_bytes: int = 1024**3, max_entries: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        if max_bytes < _MIN_BYTES or (max_entries is not None and max_entries < 1):
            raise CacheError(
                f"memory tier: max_bytes={max_bytes} must be >= {_MIN_BYTES} and max_entries={max_entries} must be "
                ">= 1; set 0 in the settings to have no such tier"
            )
        self._max_bytes = max_bytes
        self._max_entries = math.inf if max_entries is None else max_entries
        self._clock = clock
        self._counters = Counters()
        self._entries: OrderedDict[str, V] = OrderedDict()  # least recently used first
        self._keys_by_tag: defaultdict[str, set[str]] = defaultdict(set)
        self._n_bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def get_many(self, keys: Mapping[str, Any]) -> dict[str, V]:
        """Return the stored entries of ``keys``; an expired entry, or one that is not as expected, is removed."""
        hits: dict[str, V] = {}
        with self._lock:
            current_time = self._clock()
            for key, expected in keys.items():
                entry = self._entries.get(key)
                if entry is None:
                    continue
                if entry.expires_at > current_time and entry.fits(expected):
                    self._entries.move_to_end(key)
                    hits[key] = entry
                else:
                    self._discard(key)
                    self._counters.add("corrupt", int(entry.expires_at > current_time))
        self._counters.add("hits", len(hits))
        self._counters.add("misses", len(keys) - len(hits))
        return hits

    def put_many(self, entries: Mapping[str, V]) -> None:
        """Store ``entries``, replacing earlier ones; an entry that exceeds the limit leaves its key without one."""
        for key, entry in entries.items():
            n_bytes = entry.n_bytes + _OVERHEAD_BYTES
            with self._lock:
                self._discard(key)
                if self._closed or n_bytes > self._max_bytes:
                    continue
                while self._n_bytes + n_bytes > self._max_bytes or len(self._entries) >= self._max_entries:
                    self._discard(next(iter(self._entries)))
                    self._counters.add("evictions")
                self._entries[key] = entry
                self._n_bytes += n_bytes
                for tag in entry.tags:
                    self._keys_by_tag[tag].add(key)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, sorted. This is no use of their entries."""
        with self._lock:
            current_time = self._clock()
            return sorted(
                key
                for key, entry in self._entries.items()
                if key.startswith(prefix) and entry.expires_at > current_time
            )

    def tags(self) -> frozenset[str]:
        """Return the tags of all entries."""
        with self._lock:
            return frozenset(self._keys_by_tag)

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Delete every entry that has one of ``tags``; return how many there were."""
        with self._lock:
            keys = {key for tag in tags for key in self._keys_by_tag.get(tag, ())}
            for key in keys:
                self._discard(key)
        return len(keys)

    def clear(self) -> int:
        """Delete every entry; return how many there were."""
        with self._lock:
            count = len(self._entries)
            self._entries.clear()
            self._keys_by_tag.clear()
            self._n_bytes = 0
        return count

    def stats(self) -> TierStats:
        """Return what the tier has done and holds."""
        with self._lock:
            entries, n_bytes = len(self._entries), self._n_bytes
        return TierStats.counted(self.name, self._counters, entries=entries, n_bytes=n_bytes)

    def close(self) -> None:
        """Delete every entry and store no more."""
        with self._lock:
            self._closed = True
        self.clear()

    def _discard(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._n_bytes -= entry.n_bytes + _OVERHEAD_BYTES
        for tag in entry.tags:
            keys = self._keys_by_tag[tag]
            keys.discard(key)
            if not keys:
                del self._keys_by_tag[tag]
