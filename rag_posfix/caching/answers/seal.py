"""A checksum in front of a value, so that a damaged value, or that of another key, is recognised."""

from __future__ import annotations

import hashlib

_MAGIC = b"RPX1"
_DIGEST_BYTES = 16
SEAL_BYTES = len(_MAGIC) + _DIGEST_BYTES
"""What a seal adds to a value."""


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
