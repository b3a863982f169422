"""Entries made smaller for a slow network. Packed or not is seen from the first bytes, so both can be mixed."""

from __future__ import annotations

import zlib

__all__ = ["pack", "unpack"]

_MAGIC = b"RPKZ"
_LEVEL = 1


def pack(data: bytes) -> bytes:
    """Return ``data`` compressed, or as it is where that is not smaller."""
    packed = _MAGIC + zlib.compress(data, _LEVEL)
    return packed if len(packed) < len(data) else data


def unpack(data: object, most_bytes: int) -> object:
    """Return what ``pack`` was given, anything else as it is, or None for what is damaged or larger than expected."""
    if not isinstance(data, bytes) or not data.startswith(_MAGIC):
        return data
    stream = zlib.decompressobj()
    try:
        whole = stream.decompress(memoryview(data)[len(_MAGIC) :], most_bytes)
    except zlib.error:
        return None
    return whole if stream.eof and not stream.unused_data else None
