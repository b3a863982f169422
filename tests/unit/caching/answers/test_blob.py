import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.caching.answers.tiered import SEAL_BYTES, seal, unseal


@given(key=st.text(st.characters(exclude_categories=["Cs"])), value=st.binary())
def test_a_sealed_value_comes_back(key, value):
    sealed = seal(key, value)
    assert len(sealed) == SEAL_BYTES + len(value)
    assert unseal(key, sealed) == value


def test_the_format_is_the_one_of_stored_entries():
    # Magic number, then 16 bytes of BLAKE2b over the length of the key (8 bytes, big-endian), the key and the value.
    digest = hashlib.blake2b(b"\0\0\0\0\0\0\0\x03key" + b"value", digest_size=16).digest()
    assert seal("key", b"value") == b"RPX1" + digest + b"value"


@given(place=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_wherever_it_is(place, bit):
    data = bytearray(seal("key", b"answer"))
    data[place % len(data)] ^= 1 << bit
    assert unseal("key", bytes(data)) is None


@pytest.mark.parametrize("sealed", [None, 5, "text", b"", b"RPX1", b"nonsense" * 9, seal("key", b"answer")[:-1]])
def test_what_is_not_a_whole_sealed_value_is_none(sealed):
    assert unseal("key", sealed) is None


def test_key_and_value_are_separated_unambiguously():
    assert unseal("ab", seal("a", b"b" + b"c")) is None
    assert unseal("ab", seal("a", b"c")) is None
