"""Bytes as entries of a cache, stored behind a checksum over key and value."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

_MAGIC = b"RPX1"
_DIGEST_BYTES = 16
SEAL_BYTES = len(_MAGIC) + _DIGEST_BYTES
"""What a seal adds to a value."""


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that can be deleted by each of ``tags`` and expire at ``expires_at`` (seconds since 1970).

    ``position`` is how far the log of deletions was read before they were computed. A tier may return the bytes alone,
    without tags, expiry and position.
    """

    data: bytes
    tags: tuple[str, ...] = ()
    expires_at: float = math.inf
    position: int = 0

    @property
    def n_bytes(self) -> int:
        return len(self.data)

    def fits(self, expected: Any) -> bool:
        return True


class BlobCodec:
    """Stores answers and other bytes."""

    cache = "answer cache"
    file_name = "answers-v1.sqlite3"
    redis_prefix = "rag_posfix:answer:"
    redis_tag_prefix = "rag_posfix:tag:"
    redis_index: str | None = None
    redis_deletions = "rag_posfix:answer-deletions"

    def encode(self, key: str, entry: Blob) -> list[bytes | memoryview]:
        return [seal(key, entry.data)]

    def decode(self, key: str, data: object, expected: Any) -> Blob | None:
        value = unseal(key, bytes(data) if isinstance(data, memoryview) else data)
        return None if value is None else Blob(value)

    def allocate(self, n_bytes: int) -> memoryview:
        return memoryview(bytearray(n_bytes))


def seal(key: str, value: bytes) -> bytes:
    """Return ``value`` with a checksum over it and its key.

    The key is part of the checksum, so that the value of another key, as a store that mixes up its replies would
    return it, does not open.
    """
    return _MAGIC + _checksum(key, value) + value


def unseal(key: str, sealed: object) -> bytes | None:
    """Return the value that was sealed, or None if ``sealed`` is damaged or belongs to another key."""
    if not isinstance(sealed, bytes) or len(sealed) < SEAL_BYTES or not sealed.startswith(_MAGIC):
        return None
    value = sealed[SEAL_BYTES:]
    return value if sealed[len(_MAGIC) : SEAL_BYTES] == _checksum(key, value) else None


def _checksum(key: str, value: bytes) -> bytes:
    name = key.encode()
    digest = hashlib.blake2b(len(name).to_bytes(8, "big") + name, digest_size=_DIGEST_BYTES)
    digest.update(value)
    return digest.digest()
