"""Tiers of a cache: interfaces of tiers, entries and codecs, and a cache that looks entries up in several tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from rag_posfix.caching.deletions import DeletionLog, DeletionStore
from rag_posfix.caching.guard import Counters, Guard
from rag_posfix.contracts.method_spec import parse_method
from rag_posfix.errors import CacheError
from rag_posfix.registry import Registry

_T = TypeVar("_T")
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

    @property
    def position(self) -> int:
        """How far the log of deletions was read before the entry was computed."""
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
    redis_deletions: str
    """Stream of the deleted tags in Redis."""

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
    def immediate(self) -> bool:
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
        lease_seconds: float = 0.0,
        lifetime_seconds: float | None = None,
    ) -> None:
        if not tiers:
            raise CacheError(f"{cache}: needs at least one tier; pass None in place of the cache to have none")
        self._tiers = tuple(tiers)
        self._guard = Guard(cache)
        logs = {tier.name: self._call(tier, lambda tier: getattr(tier, "deletions", None), None) for tier in tiers}
        stores = {name: log for name, log in logs.items() if isinstance(log, DeletionStore)}
        self._shared = frozenset(stores)
        self._deletions_log = DeletionLog(
            cache,
            next(iter(stores.values()), None),
            lease_seconds=lease_seconds,
            lifetime_seconds=lifetime_seconds,
            drop=self._drop_copies,
        )
        self._delete_lock = threading.Lock()
        self._copy_lock = threading.Lock()
        self._deletions = 0  # increased at the start and at the end of each deletion, so odd during one

    def tier_stats(self) -> list[dict[str, Any]]:
        """Return the statistics of each tier as plain data, or only its name if it raises."""
        stats = [(tier.name, self._call(tier, lambda tier: tier.stats(), None)) for tier in self._tiers]
        return [{"name": name} if counts is None else asdict(counts) for name, counts in stats]

    @property
    def position(self) -> int:
        """How far the log of deletions was read. An entry gets the position from before it was computed."""
        return self._deletions_log.position

    @property
    def pending_deletions(self) -> int:
        """Deleted tags that other processes may still serve, because the shared tier fails or had them just now."""
        return self._deletions_log.pending

    def flush_deletions(self, timeout_seconds: float) -> bool:
        """Wait until no process serves what was deleted; return False after the timeout."""
        return self._deletions_log.flush(timeout_seconds)

    def close(self) -> None:
        """Close every tier; later calls are misses."""
        self._deletions_log.close()
        for tier in self._tiers:
            self._call(tier, lambda tier: tier.close(), None)

    def _call(self, tier: Tier[V], operation: Callable[[Tier[V]], _T], default: _T) -> _T:
        return self._guard.call(f"the {tier.name} tier", lambda: operation(tier), default)

    def _get(self, tier: Tier[V], keys: Mapping[str, Any]) -> dict[str, V]:
        return self._call(tier, lambda tier: tier.get_many(keys), {})

    def _search(
        self, keys: Mapping[str, Any], accept: Callable[[dict[str, V]], dict[str, V]], *, immediate: bool = False
    ) -> dict[str, V]:
        """Return the entries that ``accept`` accepts; a tier is searched for the keys that earlier tiers lack.

        With ``immediate`` only immediate tiers are searched.
        """
        hits: dict[str, V] = {}
        deletions = self._deletions
        missing = dict(keys)
        log = self._deletions_log
        is_current = log.is_current()
        for index, tier in enumerate(self._tiers):
            if not missing:
                break
            if immediate and not tier.immediate:
                continue
            if not is_current and tier.name not in self._shared:  # the shared tier may have the entry too
                continue
            entries = accept(self._get(tier, missing))
            if entries and not is_current and not log.is_current(wait=True):
                continue
            entries = log.surviving(entries)  # after the log was read
            if entries and index:
                self._copy_hits(deletions, partial(self._put, entries, index))
            hits.update(entries)
            missing = {key: expected for key, expected in missing.items() if key not in entries}
        if not is_current:
            log.start()
        return hits

    def _put(self, entries: Mapping[str, V], n_tiers: int) -> None:
        """Write ``entries`` to the first ``n_tiers`` tiers."""
        for tier in self._tiers[:n_tiers]:
            self._call(tier, lambda tier: tier.put_many(entries), None)

    def _copy_hits(self, deletions: int, write: Callable[[], None]) -> None:
        """Write, unless an entry was deleted since a search read ``deletions``: it could be one of these."""
        with self._copy_lock:
            if deletions == self._deletions and deletions % 2 == 0:
                write()

    def _delete_tags(self, tags: Sequence[str], prepare: Callable[[], object] = lambda: None) -> int:
        def prepare_and_log() -> None:
            prepare()
            self._deletions_log.delete(tags)

        return self._delete(lambda tier: tier.delete_tags(tags), prepare_and_log)

    def _drop_copies(self, tags: Sequence[str], late: bool) -> None:
        """Delete the entries of ``tags`` from memory; from every tier if the shared one failed before."""
        for tier in self._tiers:
            if late or tier.immediate:
                self._call(tier, lambda tier: tier.delete_tags(tags), 0)

    def _delete(self, operation: Callable[[Tier[V]], int], prepare: Callable[[], object] = lambda: None) -> int:
        """Delete entries from every tier, the slowest first; return the largest count of a tier.

        ``prepare`` is called before, when hits are no longer copied.
        """
        with self._delete_lock:
            with self._copy_lock:
                self._deletions += 1
            try:
                prepare()
                return max(self._call(tier, operation, 0) for tier in reversed(self._tiers))
            finally:
                with self._copy_lock:
                    self._deletions += 1


def map_in(pool: ThreadPoolExecutor, function: Callable[[_Item], _T], items: Sequence[_Item]) -> list[_T]:
    """Apply ``function`` to several items at once: hashing and reading files release the GIL."""
    return [function(item) for item in items] if len(items) < 2 else list(pool.map(function, items))
