"""What a tier of the passage KV store is: entries under keys, many at a time, with tags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from rag_posfix.caching.backends import Backends
from rag_posfix.caching.kv.entry import EntryShape, PassageKV
from rag_posfix.caching.tier import Tier

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


@runtime_checkable
class TagsAtHand(Protocol):
    """A tier that knows the tags of all its entries without looking anywhere. The memory tier implements it."""

    def tags(self) -> frozenset[str]:
        """Return the tags of all entries."""
        ...


class Secret(Protocol):
    """Text that is not shown by accident, such as a URL with a password (pydantic's ``SecretStr``)."""

    def get_secret_value(self) -> str:
        """Return the text."""
        ...


class PassageStoreOptions(Protocol):
    """Which tiers there are, and their bounds. ``settings.PassageStoreSettings`` has these fields and says more."""

    @property
    def enabled(self) -> bool:
        """Whether passages are kept at all."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Size bound of the memory tier; 0 turns it off."""
        ...

    def disk_bytes_in(self, cache_dir: Path) -> int:
        """Return the size bound of the disk tier in ``cache_dir``; 0 turns it off."""
        ...

    @property
    def redis_url(self) -> Secret | None:
        """Where the shared tier is; None turns it off."""
        ...

    @property
    def redis_timeout_seconds(self) -> float:
        """Bound of one search in Redis."""
        ...

    @property
    def redis_bytes(self) -> int:
        """Size bound of all passages in Redis."""
        ...

    @property
    def redis_ttl_seconds(self) -> float:
        """How long a passage is kept in Redis."""
        ...

    @property
    def compress(self) -> bool:
        """Whether passages are sent to Redis compressed."""
        ...


KV_BACKENDS: Backends[PassageStoreOptions, PassageTier] = Backends(PASSAGE_STORE)
