"""The passage KV store: keys and values of passages in tiers, fastest first. A failing tier never fails a question.

It knows tiers and entries, and neither models nor plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from rag_posfix.caching.health import Health
from rag_posfix.caching.kv.entry import EntryShape, PassageKV
from rag_posfix.caching.kv.tier import PASSAGE_STORE, PassageTier, TagsAtHand
from rag_posfix.caching.kv.write_behind import WriteBehind
from rag_posfix.caching.tier import Counters
from rag_posfix.caching.tier_stack import TierStack

if TYPE_CHECKING:
    import torch

_CLOSE_SECONDS = 10.0


class PassageStore:
    """Keeps entries in every tier and returns them from the first that has them.

    Tiers that are not immediate are written in the background, after the answer. A hit is copied to the tiers before
    it, with its tags, so that a copy can be dropped with the original. A tier is asked only for what those before it
    lack, so an entry that memory serves is not marked as used on disk. ``drop`` and ``clear`` reach the tiers of this
    process; the memory of other processes keeps its copies.

    Args:
        tiers: The tiers, fastest first, at least one.
        device: Where entries are kept in memory and returned.
        queue_bytes: Most bytes of entries that wait to be written; they stay in memory meanwhile.

    Raises:
        CacheError: There is no tier.
    """

    def __init__(
        self,
        tiers: Sequence[PassageTier],
        *,
        device: torch.device | str = "cpu",
        queue_bytes: int = 256 * 1024**2,
    ) -> None:
        self._tiers = TierStack(tiers, PASSAGE_STORE)
        self._immediate = tuple(tier.immediate for tier in tiers)
        self._device = device
        self._behind = WriteBehind(self._write_behind, queue_bytes)
        self._health = Health("copying entries", PASSAGE_STORE)
        self._counters = Counters()

    @property
    def queue_bytes(self) -> int:
        """Most bytes of entries that wait to be written."""
        return self._behind.max_bytes

    def get_many(self, keys: Mapping[str, EntryShape]) -> dict[str, PassageKV]:
        """Return the entries of those of ``keys`` that a tier holds undamaged, on the store's device."""
        found: dict[str, PassageKV] = {}
        deletions = self._tiers.deletions
        missing = dict(keys)
        for place in range(len(self._tiers)):
            if not missing:
                break
            hits = self._on_device(self._search(place, missing))
            if hits and place:
                self._tiers.copy_hit(deletions, partial(self._put, hits, place))
            found.update(hits)
            missing = {key: shape for key, shape in missing.items() if key not in hits}
        self._counters.add("hits", len(found))
        self._counters.add("misses", len(missing))
        self._counters.add("hit_bytes", sum(entry.n_bytes for entry in found.values()))
        return found

    def put_many(self, entries: Mapping[str, PassageKV], tags: Mapping[str, Sequence[str]] | None = None) -> None:
        """Keep ``entries``: in memory at once, in slower tiers in the background.

        Args:
            entries: The entries by key. Their tensors must not be written to from now on.
            tags: For each key the content keys of the documents it was made from. A key that is put again loses the
                tags it had; one that is found keeps them.
        """
        tags_of = tags or {}
        placed = self._on_device({key: entry.tagged(tags_of.get(key, ())) for key, entry in entries.items()})
        self._put(placed, len(self._tiers))

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until every tier has been given what was put; return whether that took at most ``timeout_seconds``."""
        return self._behind.flush(timeout_seconds)

    def drop(self, tags: Sequence[str]) -> int:
        """Drop every entry that has one of ``tags``; return the most that one tier held."""
        return self._drop(lambda tier: tier.delete_tags(tags), tags)

    def clear(self) -> int:
        """Drop every entry; return the most that one tier held."""
        return self._drop(lambda tier: tier.clear(), None)

    def stats(self) -> dict[str, Any]:
        """Return the counts of the store and, under ``tiers``, those of each tier.

        ``hits`` and ``misses`` count the entries asked for, ``hit_bytes`` the bytes of the hits, ``bytes`` those that
        the tiers hold, ``dropped_writes`` entries that did not fit into the queue, ``pending_writes`` those in it.
        """
        tiers = self._tiers.stats()
        counts = {name: self._counters[name] for name in ("hits", "misses", "hit_bytes", "errors", "dropped_writes")}
        held = sum(int(tier.get("bytes") or 0) for tier in tiers)
        return {**counts, "bytes": held, "pending_writes": self._behind.pending, "tiers": tiers}

    def tags_at_hand(self) -> frozenset[str]:
        """Return the tags of the entries in memory: what is found without a look at the disk or at Redis."""
        immediate = (tier for tier, at_once in zip(self._tiers, self._immediate, strict=True) if at_once)
        none: frozenset[str] = frozenset()
        return none.union(*(tier.call(_tags_at_hand, none) for tier in immediate))

    def lasting_stats(self) -> list[dict[str, Any]]:
        """Return the counts of the tiers that are written in the background; of all tiers if there are none such."""
        behind = [tier for tier, immediate in zip(self._tiers, self._immediate, strict=True) if not immediate]
        return [tier.stats() for tier in behind or self._tiers]

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Write the queue, for ``timeout_seconds`` at most, and close every tier; later calls are misses."""
        self._behind.close(timeout_seconds)
        self._tiers.close()

    def _search(self, place: int, keys: Mapping[str, EntryShape]) -> dict[str, PassageKV]:
        return self._tiers[place].call(lambda tier: tier.get_many(keys), {})

    def _on_device(self, entries: Mapping[str, PassageKV]) -> dict[str, PassageKV]:
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

    def _put(self, entries: Mapping[str, PassageKV], n_tiers: int) -> None:
        self._write(entries, n_tiers, immediate=True)
        if not all(self._immediate[:n_tiers]):
            self._counters.add("dropped_writes", self._behind.add(entries, n_tiers))

    def _write_behind(self, entries: Mapping[str, PassageKV], n_tiers: int) -> None:
        self._write(entries, n_tiers, immediate=False)

    def _write(self, entries: Mapping[str, PassageKV], n_tiers: int, *, immediate: bool) -> None:
        """Write ``entries`` to those of the first ``n_tiers`` tiers that are immediate, or to those that are not."""
        for tier, is_immediate in islice(zip(self._tiers, self._immediate, strict=True), n_tiers):
            if is_immediate == immediate:
                tier.call(lambda opened: opened.put_many(entries), None)

    def _drop(self, operation: Callable[[PassageTier], int], tags: Sequence[str] | None) -> int:
        return self._tiers.delete(operation, lambda: self._behind.cancel(tags))


def _tags_at_hand(tier: PassageTier) -> frozenset[str]:
    return tier.tags() if isinstance(tier, TagsAtHand) else frozenset()
