"""What a tier of the answer cache is: a store of bytes under keys, with tags. It knows nothing of answers."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["SEAL_BYTES", "ByteCache", "Counters", "ListedCache", "TierStats", "seal", "unseal"]

_MAGIC = b"RPX1"
_DIGEST_BYTES = 16
SEAL_BYTES = len(_MAGIC) + _DIGEST_BYTES
"""What a seal adds to a value."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier has done since it was made, and what it holds.

    Attributes:
        name: ``memory``, ``disk``, ``redis``.
        hits: Keys found.
        misses: Keys not found, whatever the reason.
        errors: Operations that the store failed.
        corrupt: Entries that were damaged; each was a miss.
        evictions: Entries that had to go for others.
        entries: Entries held, or None where counting them would cost too much.
        bytes: Space used, or None likewise.
        available: Whether the tier is used now; False while it is failing and given a rest.
    """

    name: str
    hits: int = 0
    misses: int = 0
    errors: int = 0
    corrupt: int = 0
    evictions: int = 0
    entries: int | None = None
    bytes: int | None = None
    available: bool = True


@runtime_checkable
class ByteCache(Protocol):
    """A tier. Its own failures are misses and are counted; it may be used by several threads at once."""

    @property
    def name(self) -> str:
        """Name for logs and statistics."""
        ...

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None."""
        ...

    def set(self, key: str, value: bytes, ttl_seconds: float, tags: Sequence[str] = ()) -> None:
        """Keep ``value`` for ``ttl_seconds``; ``tags`` name what it can be dropped by."""
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
        """Let go of files, sockets and threads; every later ``get`` is a miss."""
        ...


@runtime_checkable
class ListedCache(ByteCache, Protocol):
    """A tier that can say what it holds. The one in memory and the one on disk can."""

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, sorted."""
        ...


class Counters:
    """Named counts that several threads add to."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to the count ``name``."""
        with self._lock:
            self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]


def seal(key: str, value: bytes) -> bytes:
    """Return ``value`` with a checksum over it and its key.

    The key is part of the checksum, so that the value of another key, as a store that mixes up its replies would
    return it, does not open.
    """
    return _MAGIC + _checksum(key, value) + value


def unseal(key: str, sealed: object) -> bytes | None:
    """Return what ``seal`` was given, or None if ``sealed`` is damaged or belongs to another key."""
    if not isinstance(sealed, bytes) or len(sealed) < SEAL_BYTES or not sealed.startswith(_MAGIC):
        return None
    value = sealed[SEAL_BYTES:]
    return value if sealed[len(_MAGIC) : SEAL_BYTES] == _checksum(key, value) else None


def _checksum(key: str, value: bytes) -> bytes:
    name = key.encode()
    digest = hashlib.blake2b(len(name).to_bytes(8, "big") + name, digest_size=_DIGEST_BYTES)
    digest.update(value)
    return digest.digest()
