import os
import zlib

import pytest

from rag_posfix.caching.kv.packing import pack, unpack

TEXT = b"the same again " * 1000


def test_what_can_be_smaller_is():
    assert len(pack(TEXT)) < len(TEXT) / 10
    assert unpack(pack(TEXT), len(TEXT)) == TEXT


@pytest.mark.parametrize("data", [b"", b"x", os.urandom(5000)])
def test_what_cannot_be_smaller_stays_as_it_is(data):
    assert pack(data) == data
    assert unpack(data, 10**6) == data


@pytest.mark.parametrize("data", [None, 5, b"RPK1 whatever"])
def test_what_was_not_packed_is_left_alone(data):
    assert unpack(data, 10) == data


def test_damage_is_found():
    packed = pack(TEXT)
    for data in (packed[:-1], packed + b"\0", packed[:10], packed[:4], packed[:4] + b"\xff" * 50):
        assert unpack(data, len(TEXT)) is None
    # zlib's own checksum finds a flipped bit, or the text is another one: then the seal inside does not hold.
    assert unpack(packed[:20] + bytes([packed[20] ^ 1]) + packed[21:], len(TEXT)) != TEXT


def test_it_does_not_grow_beyond_what_is_expected():
    bomb = b"RPKZ" + zlib.compress(bytes(50 * 1024**2), 9)
    assert unpack(bomb, 1000) is None
    assert unpack(pack(TEXT), len(TEXT) - 1) is None
