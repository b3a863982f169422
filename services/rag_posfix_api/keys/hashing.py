"""Keys and their hashes: how a key is made, what is kept of it, and how a given one is compared.

A key is ``rpk_ID_SECRET``: 16 hexadecimal digits that name it, and 256 random bits. Of the secret part a hash with
scrypt (RFC 7914, N = 2**14, r = 8, p = 1: 16 MiB and tens of milliseconds) and a random salt is kept.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from typing import Final

__all__ = ["hash_secret", "matches", "new_key", "split_key"]

_KEY = re.compile(r"rpk_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_COST: Final = (14, 8, 1)
"""Logarithm of N, then r and p."""
_MEMORY_BYTES = 64 * 1024**2
_HASH_BYTES = 32


def new_key() -> tuple[str, str, str]:
    """Return a new key: its id, its secret part, and the whole."""
    identity, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    return identity, secret, f"rpk_{identity}_{secret}"


def split_key(key: str) -> tuple[str, str] | None:
    """Return id and secret part of a key, or None for any other text."""
    found = _KEY.fullmatch(key)
    return None if found is None else (found[1], found[2])


def hash_secret(secret: str) -> str:
    """Return the hash of a secret with its salt and its cost, as text."""
    salt = secrets.token_bytes(16)
    return "$".join(["scrypt", *map(str, _COST), _text(salt), _text(_scrypt(secret, salt, *_COST))])


def matches(secret: str, stored: str) -> bool:
    """Return whether ``stored`` is a hash of ``secret``; the comparison takes the same time for any content."""
    parts = stored.split("$")
    if len(parts) != 6 or parts[0] != "scrypt":
        return False
    try:
        cost, salt, digest = [int(part) for part in parts[1:4]], *map(_bytes, parts[4:])
        given = _scrypt(secret, salt, *cost)
    except (ValueError, binascii.Error, MemoryError):
        return False
    return hmac.compare_digest(given, digest)


def _scrypt(secret: str, salt: bytes, log_n: int, r: int, p: int) -> bytes:
    if not 1 <= log_n <= 20:
        raise ValueError(f"a cost of 2**{log_n} is not used here")
    return hashlib.scrypt(secret.encode(), salt=salt, n=1 << log_n, r=r, p=p, maxmem=_MEMORY_BYTES, dklen=_HASH_BYTES)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
