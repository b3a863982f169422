import os
import zlib

import pytest

from rag_posfix.caching.kv.compression import compress, decompress

TEXT = b"the same again " * 1000


def test_what_can_be_made_smaller_is():
    assert len(compress(TEXT)) < len(TEXT) / 10
    assert decompress(compress(TEXT), len(TEXT)) == TEXT


@pytest.mark.parametrize("data", [b"", b"x", os.urandom(5000)])
def test_what_cannot_be_made_smaller_is_unchanged(data):
    assert compress(data) == data
    assert decompress(data, 10**6) == data


@pytest.mark.parametrize("data", [None, 5, b"RPK1 whatever"])
def test_what_was_not_compressed_is_unchanged(data):
    assert decompress(data, 10) == data


def test_damage_is_found():
    compressed = compress(TEXT)
    for data in (compressed[:-1], compressed + b"\0", compressed[:10], compressed[:4], compressed[:4] + b"\xff" * 50):
        assert decompress(data, len(TEXT)) is None
    # zlib's own checksum finds a flipped bit, or the text is another one: then the seal inside does not hold.
    assert decompress(compressed[:20] + bytes([compressed[20] ^ 1]) + compressed[21:], len(TEXT)) != TEXT


def test_it_does_not_decompress_more_than_it_may():
    bomb = b"RPKZ" + zlib.compress(bytes(50 * 1024**2), 9)
    assert decompress(bomb, 1000) is None
    assert decompress(compress(TEXT), len(TEXT) - 1) is None
