"""Compression of entries for slow networks. Compressed data begin with a mark, so both forms can be mixed."""

from __future__ import annotations

import zlib

_MAGIC = b"RPKZ"
_LEVEL = 1


def compress(data: bytes) -> bytes:
    """Return ``data`` compressed with zlib, or unchanged where that is not smaller."""
    compressed = _MAGIC + zlib.compress(data, _LEVEL)
    return compressed if len(compressed) < len(data) else data


def decompress(data: object, max_bytes: int) -> object:
    """Return what ``compress`` was given; data that it has not compressed are returned unchanged.

    Args:
        max_bytes: Most bytes to decompress. Damaged data, and what would be larger, are None.
    """
    if not isinstance(data, bytes) or not data.startswith(_MAGIC):
        return data
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(memoryview(data)[len(_MAGIC) :], max_bytes)
    except zlib.error:
        return None
    return content if stream.eof and not stream.unused_data else None
