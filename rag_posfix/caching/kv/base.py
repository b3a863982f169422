"""What a tier of the passage store is: entries under keys, many at a time, with tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from rag_posfix.caching.kv.entry import EntryShape, PassageKV
from rag_posfix.caching.tier import TierStats

__all__ = ["PassageTier"]


@runtime_checkable
class PassageTier(Protocol):
    """A tier. Its own failures are misses and are counted; it may be used by several threads at once."""

    @property
    def name(self) -> str:
        """Name for logs and statistics."""
        ...

    @property
    def immediate(self) -> bool:
        """Whether writing costs next to nothing; otherwise entries are written behind the answer."""
        ...

    def get_many(self, keys: Mapping[str, EntryShape]) -> dict[str, PassageKV]:
        """Return those of ``keys`` that are held and are as expected."""
        ...

    def put_many(self, entries: Mapping[str, PassageKV]) -> None:
        """Keep ``entries`` with their tags."""
        ...

    def delete_tags(self, tags: Sequence[str]) -> int:
        """Drop every entry with one of ``tags``; return how many there were."""
        ...

    def clear(self) -> int:
        """Drop every entry; return how many there were."""
        ...

    def stats(self) -> TierStats:
        """Return what the tier has done and holds."""
        ...

    def close(self) -> None:
        """Let go of files, sockets and threads; every later ``get_many`` is a miss."""
        ...
