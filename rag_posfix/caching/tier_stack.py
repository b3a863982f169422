"""The tiers of one cache, fastest first. A tier that raises is skipped and logged once; it never fails a request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from rag_posfix.caching.health import Health
from rag_posfix.caching.tier import Tier
from rag_posfix.errors import CacheError

_TierT = TypeVar("_TierT", bound=Tier)
_T = TypeVar("_T")


class FailSafeTier(Generic[_TierT]):
    """A tier whose exceptions are logged and replaced by a default.

    Tiers handle the failures of their stores themselves; this catches what they did not foresee.

    Args:
        cache: The cache that the tier belongs to, for the log.
    """

    def __init__(self, tier: _TierT, cache: str) -> None:
        self._tier = tier
        self._health = Health(f"the {tier.name} tier", cache)

    def call(self, operation: Callable[[_TierT], _T], default: _T) -> _T:
        """Return what ``operation`` returns for the tier, or ``default`` if it raises."""
        try:
            result = operation(self._tier)
        except Exception as error:
            self._health.failed(error)
            return default
        self._health.worked()
        return result

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the tier as plain data, or only its name if it cannot tell them."""
        return self.call(lambda tier: asdict(tier.stats()), {"name": self._tier.name})


class TierStack(Generic[_TierT]):
    """The tiers of one cache. Indexing and iterating give each as a ``FailSafeTier``.

    Args:
        tiers: The tiers, fastest first, at least one.
        cache: What the log and errors call the cache.

    Raises:
        CacheError: ``tiers`` is empty.
    """

    def __init__(self, tiers: Sequence[_TierT], cache: str) -> None:
        if not tiers:
            raise CacheError(f"{cache}: needs at least one tier; pass None in place of the cache to have none")
        self._tiers = tuple(FailSafeTier(tier, cache) for tier in tiers)
        self._delete_lock = threading.Lock()
        self._copy_lock = threading.Lock()
        self._deletions = 0

    @property
    def deletions(self) -> int:
        """Increased at the start and at the end of each deletion, so odd during one; read it before a search."""
        return self._deletions

    def __len__(self) -> int:
        return len(self._tiers)

    def __getitem__(self, place: int) -> FailSafeTier[_TierT]:
        return self._tiers[place]

    def __iter__(self) -> Iterator[FailSafeTier[_TierT]]:
        return iter(self._tiers)

    def copy_hit(self, deletions: int, write: Callable[[], None]) -> None:
        """Copy a hit to faster tiers, unless an entry was deleted since the search began: it could be this one.

        Args:
            deletions: ``deletions`` before the search.
        """
        with self._copy_lock:
            if deletions == self._deletions and deletions % 2 == 0:
                write()

    def delete(self, operation: Callable[[_TierT], int], prepare: Callable[[], object] | None = None) -> int:
        """Delete entries from every tier, the slowest first; return the most that one tier held.

        Args:
            operation: Deletes the entries of one tier and returns how many there were.
            prepare: Called before, when hits are no longer copied.
        """
        with self._delete_lock:
            with self._copy_lock:
                self._deletions += 1
            try:
                if prepare is not None:
                    prepare()
                return max(tier.call(operation, 0) for tier in reversed(self._tiers))
            finally:
                with self._copy_lock:
                    self._deletions += 1

    def stats(self) -> list[dict[str, Any]]:
        """Return the statistics of each tier as plain data."""
        return [tier.stats() for tier in self._tiers]

    def close(self) -> None:
        """Close every tier."""
        for tier in self._tiers:
            tier.call(lambda opened: opened.close(), None)
