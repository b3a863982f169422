"""The passage store: entries over tiers, fastest first. A failing tier never fails a question.

Knows tiers and entries; knows no model and no plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rag_posfix.caching.guard import Guard
from rag_posfix.caching.health import Health
from rag_posfix.caching.kv.base import PassageTier
from rag_posfix.caching.kv.entry import EntryShape, PassageKV
from rag_posfix.caching.kv.write_behind import WriteBehind
from rag_posfix.caching.tier import Counters
from rag_posfix.errors import CacheError

if TYPE_CHECKING:
    import torch

__all__ = ["PassageStore"]

_CACHE = "passage store"
_CLOSE_SECONDS = 10.0


class PassageStore:
    """Keeps entries in every tier and returns them from the first that has them.

    Tiers that are not immediate are written behind the answer. A hit is copied into the tiers before it, with its
    tags, so that a copy can be dropped like the original. A tier is asked only for what those before it lack, so an
    entry that memory serves counts as unused on disk. ``drop`` and ``clear`` reach the tiers of this process: the
    memory of other processes keeps its copies.

    Args:
        tiers: The stores, fastest first, at least one.
        device: Where entries are kept in memory and returned.
        queue_bytes: Most bytes of entries that wait to be written; they are kept alive meanwhile.
    """

    def __init__(
        self,
        tiers: Sequence[PassageTier],
        *,
        device: torch.device | str = "cpu",
        queue_bytes: int = 256 * 1024**2,
    ) -> None:
        if not tiers:
            raise CacheError("passage store: needs at least one tier; use no store at all instead")
        self._tiers = tuple(Guard(tier, _CACHE) for tier in tiers)
        self._immediate = tuple(tier.immediate for tier in tiers)
        self._device = device
        self._behind = WriteBehind(self._write_behind, queue_bytes)
        self._health = Health("copying entries", _CACHE)
        self._counters = Counters()
        self._drop_lock = threading.Lock()
        self._copy_lock = threading.Lock()
        # Odd while entries are being dropped. A hit may be copied only if it is even and as it was before the search:
        # otherwise the copy could bring back what was dropped meanwhile.
        self._drops = 0

    @property
    def queue_bytes(self) -> int:
        """Most bytes of entries that wait to be written."""
        return self._behind.max_bytes

    def get_many(self, keys: Mapping[str, EntryShape]) -> dict[str, PassageKV]:
        """Return those of ``keys`` that a tier has whole and as expected, on the store's device."""
        found: dict[str, PassageKV] = {}
        drops = self._drops
        missing = dict(keys)
        for place in range(len(self._tiers)):
            if not missing:
                break
            hits = self._placed(self._search(place, missing))
            self._copy(hits, place, drops)
            found.update(hits)
            missing = {key: shape for key, shape in missing.items() if key not in hits}
        self._counters.add("hits", len(found))
        self._counters.add("misses", len(missing))
        self._counters.add("hit_bytes", sum(entry.n_bytes for entry in found.values()))
        return found

    def put_many(self, entries: Mapping[str, PassageKV], tags: Mapping[str, Sequence[str]] | None = None) -> None:
        """Keep ``entries``: in memory at once, elsewhere behind the answer.

        Args:
            entries: What was read, by key. Nobody may write into the tensors from now on.
            tags: For each key the content keys of the documents it was made from. A key that is put again loses the
                tags it had; one that is found again keeps them.
        """
        named = tags or {}
        placed = self._placed({key: entry.tagged(named.get(key, ())) for key, entry in entries.items()})
        self._store(placed, len(self._tiers))

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until every tier was given what was put; return whether it was within ``timeout_seconds``."""
        return self._behind.flush(timeout_seconds)

    def drop(self, tags: Sequence[str]) -> int:
        """Drop every entry with one of ``tags``; return the most that one tier held."""
        return self._dropping(lambda tier: tier.delete_tags(tags), tags)

    def clear(self) -> int:
        """Drop every entry; return the most that one tier held."""
        return self._dropping(lambda tier: tier.clear(), None)

    def stats(self) -> dict[str, Any]:
        """Return the counts of the store and, under ``tiers``, those of each tier.

        ``hits`` and ``misses`` count entries asked for, ``hit_bytes`` what the hits held, ``bytes`` what the tiers
        hold, ``dropped_writes`` entries that the queue had no room for, ``pending_writes`` those in it.
        """
        tiers = [_stats_of(tier) for tier in self._tiers]
        counts = {name: self._counters[name] for name in ("hits", "misses", "hit_bytes", "errors", "dropped_writes")}
        held = sum(int(tier.get("bytes") or 0) for tier in tiers)
        return {**counts, "bytes": held, "pending_writes": self._behind.pending, "tiers": tiers}

    def lasting_stats(self) -> list[dict[str, Any]]:
        """Return the counts of the tiers that are written behind the answer; of all if there are none such."""
        behind = [tier for tier, immediate in zip(self._tiers, self._immediate, strict=True) if not immediate]
        return [_stats_of(tier) for tier in behind or self._tiers]

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Write what waits, for ``timeout_seconds`` at most, and close every tier; later calls are misses."""
        self._behind.close(timeout_seconds)
        for tier in self._tiers:
            tier.call(lambda t: t.close(), None)

    def _search(self, place: int, keys: Mapping[str, EntryShape]) -> dict[str, PassageKV]:
        return self._tiers[place].call(lambda tier: tier.get_many(keys), {})

    def _placed(self, entries: Mapping[str, PassageKV]) -> dict[str, PassageKV]:
        """Return ``entries`` on the store's device, without those for which it has no memory."""
        placed: dict[str, PassageKV] = {}
        for key, entry in entries.items():
            try:
                placed[key] = entry.on(self._device)
            except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
                self._counters.add("errors")
                self._health.failed(error)
        if placed:
            self._health.worked()
        return placed

    def _copy(self, hits: Mapping[str, PassageKV], below: int, drops: int) -> None:
        """Copy ``hits`` into the tiers before the place ``below``, unless something was dropped since ``drops``."""
        if not hits or not below:
            return
        with self._copy_lock:
            if drops == self._drops and drops % 2 == 0:
                self._store(hits, below)

    def _store(self, entries: Mapping[str, PassageKV], below: int) -> None:
        for tier, immediate in zip(self._tiers[:below], self._immediate, strict=False):
            if immediate:
                tier.call(lambda t: t.put_many(entries), None)
        if not all(self._immediate[:below]):
            self._counters.add("dropped_writes", self._behind.add(entries, below))

    def _write_behind(self, entries: Mapping[str, PassageKV], below: int) -> None:
        for tier, immediate in zip(self._tiers[:below], self._immediate, strict=False):
            if not immediate:
                tier.call(lambda t: t.put_many(entries), None)

    def _dropping(self, drop: Callable[[PassageTier], int], tags: Sequence[str] | None) -> int:
        with self._drop_lock:
            with self._copy_lock:
                self._drops += 1
            try:
                self._behind.forget(tags)
                return max(tier.call(drop, 0) for tier in self._tiers)
            finally:
                with self._copy_lock:
                    self._drops += 1


def _stats_of(tier: Guard[PassageTier]) -> dict[str, Any]:
    counts: dict[str, Any] = tier.call(lambda t: asdict(t.stats()), {"name": tier.name})
    return counts
