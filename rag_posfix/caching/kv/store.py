"""The passage KV store: keys and values of passages in tiers, fastest first. A failing tier never fails a question.

A background thread writes entries to slow tiers, from a queue that is bounded by bytes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_posfix.caching.deletions import EVERYTHING
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.guard import Counters
from rag_posfix.caching.kv.entry import CacheSnapshot, ExpectedShape, KVCodec, PassageKV
from rag_posfix.caching.memory import MemoryTier
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import Tier, TieredCache, plugin_tier
from rag_posfix.files import PASSAGES_FOLDER

if TYPE_CHECKING:
    import torch

_BATCH_BYTES = 32 * 1024**2
_MAX_REDIS_SNAPSHOT_BYTES = 32 * 1024**2
"""Larger snapshots are not sent to Redis: at a gigabit per second a look-up would take longer than its time limit."""

_MAX_WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Write:
    key: str
    entry: PassageKV
    n_tiers: int


class WriteBehind:
    """Calls ``write`` with entries, in their order, in a daemon thread that starts with the first of them.

    Args:
        write: Takes entries and a number n, and writes them to the tiers among the first n that are not
            immediate. It must not raise.
        max_bytes: Most bytes of entries in the queue. An entry that would exceed it is not written, unless the queue
            is empty.
    """

    def __init__(self, write: Callable[[Mapping[str, PassageKV], int], None], max_bytes: int) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._waiting: deque[_Write] = deque()
        self._waiting_bytes = 0
        self._writing = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    @property
    def max_bytes(self) -> int:
        """Most bytes of entries in the queue."""
        return self._max_bytes

    @property
    def pending(self) -> int:
        """Entries in the queue or being written."""
        with self._changed:
            return len(self._waiting) + self._writing

    def add(self, entries: Mapping[str, PassageKV], n_tiers: int) -> int:
        """Queue ``entries`` and return at once.

        Args:
            n_tiers: Passed on to ``write``.

        Returns:
            How many did not fit into the queue and will not be written.
        """
        rejected = 0
        with self._changed:
            for key, entry in entries.items():
                full = bool(self._waiting) and self._waiting_bytes + entry.n_bytes > self._max_bytes
                if full or self._closed:
                    rejected += 1
                    continue
                self._waiting.append(_Write(key, entry, n_tiers))
                self._waiting_bytes += entry.n_bytes
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rag-posfix-passages", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return rejected

    def cancel(self, tags: Collection[str] | None = None) -> None:
        """Remove entries with one of ``tags`` from the queue, all if None, and wait for the write that is running."""
        with self._changed:
            unwanted = None if tags is None else set(tags)
            remaining = [
                write for write in self._waiting if unwanted is not None and unwanted.isdisjoint(write.entry.tags)
            ]
            self._waiting = deque(remaining)
            self._waiting_bytes = sum(write.entry.n_bytes for write in remaining)
            self._changed.notify_all()
            # The wait is bounded: if the disk hangs, the caller must not.
            self._changed.wait_for(lambda: not self._writing, _MAX_WAIT_SECONDS)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything is written; return whether that took at most ``timeout_seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Write the queue, for ``timeout_seconds`` at most, and end the thread."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            self._closed = True
        self.flush(timeout_seconds)
        with self._changed:
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()) + 0.1)

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            entries, n_tiers = batch
            try:
                self._write(entries, n_tiers)
            finally:
                del batch, entries  # tensors must not stay in memory until the next write
                with self._changed:
                    self._writing = 0
                    self._changed.notify_all()

    def _next(self) -> tuple[dict[str, PassageKV], int] | None:
        """Wait for entries and return the first of them that go to the same tiers, or None once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            n_tiers, taken, entries = self._waiting[0].n_tiers, 0, dict[str, PassageKV]()
            while self._waiting and self._waiting[0].n_tiers == n_tiers and taken < _BATCH_BYTES:
                write = self._waiting.popleft()
                entries[write.key] = write.entry
                taken += write.entry.n_bytes
            self._waiting_bytes -= taken
            self._writing = len(entries)
            return entries, n_tiers


_CLOSE_SECONDS = 10.0
_BUSY_SECONDS = 0.25


def build_passage_store(settings: Any, cache_dir: Path, device: torch.device | str = "cpu") -> PassageStore | None:
    """Return the passage KV store that ``settings`` describe, or None if they turn off every tier.

    No file is opened and nothing is connected before the first use.

    Args:
        settings: ``rag_posfix.settings.PassageStoreSettings``, which the packages that compute do not import.
        cache_dir: Folder of this process's caches; the disk tier uses ``passages`` in it.
        device: Where entries are kept in memory and returned: the device of the model.

    Raises:
        CacheError: A setting is invalid, such as a limit that holds no entry or a URL that is no Redis URL.
        ConfigError: Redis is configured and redis-py is not installed.
    """
    if not settings.enabled:
        return None
    tiers: list[Tier[PassageKV]] = []
    if settings.memory_bytes:
        tiers.append(MemoryTier(settings.memory_bytes))
    if disk_bytes := settings.disk_bytes_in(cache_dir):
        folder = cache_dir / PASSAGES_FOLDER
        tiers.append(DiskTier(folder, KVCodec(), max_bytes=disk_bytes, busy_seconds=_BUSY_SECONDS))
    if settings.redis_url is not None:
        tiers.append(
            RedisTier(
                settings.redis_url.get_secret_value(),
                KVCodec(settings.compress),
                timeout_seconds=settings.redis_timeout_seconds,
                max_bytes=settings.redis_bytes,
                ttl_seconds=settings.redis_ttl_seconds,
            )
        )
    if settings.backend is not None:
        tiers.append(plugin_tier(settings.backend, KVCodec()))
    return PassageStore(tiers, device=device) if tiers else None


class PassageStore(TieredCache[PassageKV]):
    """Keeps entries in every tier and returns them from the first that has them.

    Tiers that are not immediate are written in the background, after the answer. A hit is copied to the tiers before
    it, with its tags, so that a copy can be dropped with the original. A tier is searched only for entries that
    earlier tiers lack, so an entry that memory serves is not marked as used on disk. ``drop`` and ``clear`` reach the
    tiers of this process, and within half a second the memory of processes that share a Redis. There is no lease: keys
    and values are read only for a passage that is in the prompt, and go on being used while Redis is away.

    Args:
        tiers: The tiers, fastest first, at least one.
        device: Where entries are kept in memory and returned.
        queue_bytes: Most bytes of entries that wait to be written; they stay in memory meanwhile.

    Raises:
        CacheError: There is no tier.
    """

    def __init__(
        self,
        tiers: Sequence[Tier[PassageKV]],
        *,
        device: torch.device | str = "cpu",
        queue_bytes: int = 256 * 1024**2,
    ) -> None:
        super().__init__(tiers, KVCodec.cache)
        self._device = device
        self._behind = WriteBehind(
            lambda entries, n_tiers: self._write(entries, n_tiers, immediate=False), queue_bytes
        )
        self._counters = Counters()

    @property
    def queue_bytes(self) -> int:
        """Most bytes of entries that wait to be written."""
        return self._behind.max_bytes

    def get_many(self, keys: Mapping[str, ExpectedShape], *, memory_only: bool = False) -> dict[str, PassageKV]:
        """Return the stored entries of ``keys`` on the store's device, without damaged ones."""
        hits = self._search(keys, self._on_device, immediate=memory_only)
        self._counters.add("hits", len(hits))
        self._counters.add("misses", len(keys) - len(hits))
        self._counters.add("hit_bytes", sum(entry.n_bytes for entry in hits.values()))
        return hits

    def put_many(
        self,
        entries: Mapping[str, PassageKV],
        tags: Mapping[str, Sequence[str]] | None = None,
        *,
        memory_only: bool = False,
        position: int | None = None,
    ) -> None:
        """Keep ``entries``: in memory at once, in slower tiers in the background.

        Args:
            entries: The entries by key. Their tensors must not be written to from now on.
            tags: For each key the content keys of the documents it was made from. A key that is put again loses
                its earlier tags; a hit keeps them.
            memory_only: Whether slower tiers do not get them.
            position: ``self.position`` before the documents were read: entries of those that were deleted since are
                not kept. None: none was deleted since.
        """
        self._deletions_log.start()
        tags_of, position = tags or {}, self.position if position is None else position
        tagged = {key: entry.tagged(tags_of.get(key, ()), position) for key, entry in entries.items()}
        if memory_only:
            self._write(self._on_device(tagged), len(self._tiers), immediate=True)
        else:
            self._put(self._on_device(tagged), len(self._tiers))

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait for pending writes; return False on timeout."""
        return self._behind.flush(timeout_seconds)

    def drop(self, tags: Sequence[str]) -> int:
        """Drop every entry that has one of ``tags``; return the most that one tier held."""
        return self._delete_tags(tags, lambda: self._behind.cancel(tags))

    def clear(self) -> int:
        """Drop every entry; return the most that one tier held."""

        def prepare() -> None:
            self._behind.cancel()
            self._deletions_log.delete([EVERYTHING])

        return self._delete(lambda tier: tier.clear(), prepare)

    def stats(self) -> dict[str, Any]:
        """Return the counts of the store and, under ``tiers``, those of each tier.

        ``hits`` and ``misses`` count requested entries, ``hit_bytes`` the bytes of the hits, ``bytes`` the size of the
        tiers, ``dropped_writes`` entries that did not fit into the queue, ``pending_writes`` entries in the queue.
        """
        tiers = self.tier_stats()
        counts = {name: self._counters[name] for name in ("hits", "misses", "hit_bytes", "errors", "dropped_writes")}
        n_bytes = sum(int(tier.get("bytes") or 0) for tier in tiers)
        pending = {"pending_writes": self._behind.pending, "pending_deletions": self.pending_deletions}
        return {**counts, "bytes": n_bytes, **pending, "tiers": tiers}

    def memory_tags(self) -> frozenset[str]:
        """Return the tags of the entries in memory; reads neither disk nor Redis."""
        tags: frozenset[str] = frozenset()
        return tags.union(*(tier.tags() for tier in self._tiers if tier.immediate and isinstance(tier, MemoryTier)))

    def persistent_stats(self) -> list[dict[str, Any]]:
        """Return the counts of the tiers that are written in the background; of all tiers if there are none such."""
        stats = self.tier_stats()
        behind = [tier for tier, written in zip(stats, self._tiers, strict=True) if not written.immediate]
        return behind or stats

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Write the queue, for ``timeout_seconds`` at most, and close every tier; later calls are misses."""
        self._behind.close(timeout_seconds)
        super().close()

    def _on_device(self, entries: Mapping[str, PassageKV]) -> dict[str, PassageKV]:
        """Return ``entries`` on the store's device, without those for which it has no memory."""
        use = "copying entries"
        copies: dict[str, PassageKV] = {}
        for key, entry in entries.items():
            try:
                copies[key] = entry.on(self._device)
            except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
                self._counters.add("errors")
                self._guard.failed(use, error)
        if copies:
            self._guard.worked(use)
        return copies

    def _put(self, entries: Mapping[str, PassageKV], n_tiers: int) -> None:
        self._write(entries, n_tiers, immediate=True)
        if not all(tier.immediate for tier in self._tiers[:n_tiers]):
            self._counters.add("dropped_writes", self._behind.add(entries, n_tiers))

    def _write(self, entries: Mapping[str, PassageKV], n_tiers: int, *, immediate: bool) -> None:
        """Write ``entries``, without deleted ones, to the immediate, or the other, of the first ``n_tiers`` tiers."""
        entries = self._deletions_log.surviving(dict(entries))
        for tier in self._tiers[:n_tiers]:
            if tier.immediate == immediate:
                self._call(tier, lambda tier: tier.put_many(_accepted(tier.name, entries)), None)


def _accepted(tier: str, entries: Mapping[str, PassageKV]) -> Mapping[str, PassageKV]:
    """Return the entries that a tier gets."""
    if tier != "redis":
        return entries
    return {
        key: entry
        for key, entry in entries.items()
        if not isinstance(entry, CacheSnapshot) or entry.n_bytes <= _MAX_REDIS_SNAPSHOT_BYTES
    }
