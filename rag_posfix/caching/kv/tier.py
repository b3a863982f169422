"""What a tier of the passage KV store is: entries under keys, many at a time, with tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from rag_posfix.caching.backends import Backends
from rag_posfix.caching.kv.entry import EntryShape, PassageKV
from rag_posfix.caching.tier import Tier
from rag_posfix.settings import PassageStoreSettings

__all__ = ["KV_BACKENDS", "PASSAGE_STORE", "PassageTier"]

PASSAGE_STORE = "passage store"
"""What the log and errors call the passage KV store."""


@runtime_checkable
class PassageTier(Tier, Protocol):
    """A tier that keeps keys and values of passages."""

    @property
    def immediate(self) -> bool:
        """Whether writing takes almost no time. Other tiers are written in the background, after the answer."""
        ...

    def get_many(self, keys: Mapping[str, EntryShape]) -> dict[str, PassageKV]:
        """Return the entries of those of ``keys`` that are held and have the expected shape and dtype."""
        ...

    def put_many(self, entries: Mapping[str, PassageKV]) -> None:
        """Keep ``entries`` with their tags."""
        ...


KV_BACKENDS: Backends[PassageStoreSettings, PassageTier] = Backends(PASSAGE_STORE)
