import dataclasses
import hashlib
import json
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.caching.kv.store import (
    KVCodec,
    PassageKV,
    allocate,
    deserialize,
    serialize,
    serialize_parts,
)
from rag_posfix.errors import CacheError
from tests.support.passages import SHAPE, entry, same

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


MAGIC = b"RPKV0001"
SEAL_BYTES = 40  # magic number and SHA-256


def sealed(key, content):
    """Seal ``content`` as stored entries are: SHA-256 over the length of the key, the key and the content."""
    name = key.encode()
    return MAGIC + hashlib.sha256(len(name).to_bytes(8, "big") + name + content).digest() + content


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_tokens", [0, 1, 37])
def test_every_bit_and_the_tags_come_back(dtype, n_tokens):
    shape = dataclasses.replace(SHAPE, dtype=dtype, n_tokens=n_tokens)
    kept = entry(1, shape, tags=("a", "é\n"))
    assert same(deserialize("key", serialize("key", kept), shape), kept)


def test_it_knows_its_sizes():
    kept = entry()
    assert (kept.n_tokens, kept.n_bytes, kept.shape) == (3, 2 * 2 * 1 * 3 * 4 * 2, SHAPE)
    assert SHAPE.n_bytes == kept.n_bytes
    assert len(serialize("key", entry(tags=("tag",) * 9))) <= SHAPE.max_serialized_bytes


@pytest.mark.parametrize(
    "kv",
    [
        torch.zeros(2, 2, 3, 4),
        torch.zeros(3, 2, 1, 3, 4),
        torch.zeros(2, 2, 1, 4, 3).transpose(3, 4),
    ],
)
def test_kv_of_another_form_are_rejected(kv):
    with pytest.raises(CacheError, match=r"must be contiguous and of shape \(2, layers, heads, tokens, head_dim\)"):
        PassageKV(kv)


def test_on_a_device_it_holds_no_more_memory_than_it_needs():
    batch = torch.zeros(5, *SHAPE.sizes, dtype=SHAPE.dtype)
    kept = PassageKV(batch[2]).on("cpu")
    assert kept.kv.untyped_storage().nbytes() == kept.n_bytes
    assert kept.on("cpu") is kept


def test_what_was_read_keeps_no_more_memory_than_it_needs():
    found = deserialize("key", serialize("key", entry()), SHAPE)
    assert found.on("cpu") is found


def test_tags_are_added_once():
    kept = entry(tags=("b",))
    assert kept.tagged(["a", "b"]).tags == ("a", "b")
    assert kept.tagged([]) is kept


@given(place=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_wherever_it_is(place, bit):
    data = bytearray(serialize("key", entry(tags=("a",))))
    data[place % len(data)] ^= 1 << bit
    assert deserialize("key", bytes(data), SHAPE) is None


@given(length=st.integers(0))
def test_a_truncated_entry_is_a_miss(length):
    data = serialize("key", entry())
    assert deserialize("key", data[: length % len(data)], SHAPE) is None


WHOLE = serialize("key", entry())


@pytest.mark.parametrize(
    "data",
    [None, b"", b"nonsense", MAGIC, "text", 5, ["list"], b"\0" * 500, WHOLE + b"\0", serialize("other", entry())],
)
def test_what_is_no_entry_is_a_miss(data):
    assert deserialize("key", data, SHAPE) is None


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float16}, {"dtype": torch.int16}, {"layers": 1}, {"heads": 2}, {"head_dim": 2},
        {"n_tokens": 4},
        {"heads": SHAPE.n_tokens, "n_tokens": SHAPE.heads},
    ],
)  # fmt: skip
def test_an_entry_of_another_shape_or_type_is_a_miss(change):
    assert deserialize("key", serialize("key", entry()), dataclasses.replace(SHAPE, **change)) is None


def foreign(tensors, metadata):
    from safetensors.torch import save

    return save(tensors, metadata=metadata)


KV = entry().kv
TAGS = {"tags": "[]"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        (2**63).to_bytes(8, "little") + b"{}",
        b"\x02\0\0\0\0\0\0\0{}",
        foreign({}, TAGS),
        foreign({"other": KV}, TAGS),
        foreign({"kv": KV}, None),
        foreign({"kv": KV}, {"tags": "[1]"}),
        foreign({"kv": KV}, {"tags": "{}"}),
        foreign({"kv": KV}, {"tags": "nonsense"}),
        foreign({"kv": KV[0]}, TAGS),
    ],
)
def test_content_that_is_sealed_and_yet_no_entry_is_a_miss(content):
    assert deserialize("key", sealed("key", content), SHAPE) is None


def test_the_content_is_what_the_safetensors_package_writes_and_reads():
    from safetensors.torch import load

    written = foreign({"kv": KV}, {"tags": json.dumps(["a"])})
    assert same(deserialize("key", sealed("key", written), SHAPE), entry(tags=("a",)))
    kv = load(serialize("key", entry())[SEAL_BYTES:])["kv"]
    assert same(PassageKV(kv), entry())


def test_an_entry_shares_the_memory_it_was_read_into_and_copies_what_cannot_change():
    data = serialize("key", entry(1))
    memory = allocate(len(data))
    memory[:] = data
    found = deserialize("key", memory, SHAPE)
    memory[:] = bytes(len(data))
    assert not found.kv.any()
    copied = deserialize("key", data, SHAPE)
    copied.kv.zero_()
    assert same(deserialize("key", data, SHAPE), entry(1))


def test_the_tensor_is_aligned():
    for count in range(9):
        data = serialize("key", entry(tags=("x" * count,)))
        assert (len(data) - SHAPE.n_bytes) % 8 == 0


def test_serialising_in_parts_does_not_copy_the_tensor():
    kept = entry()
    _, content = serialize_parts("key", kept)
    before = bytes(content)
    kept.kv.zero_()
    assert bytes(content) != before


def test_key_and_content_are_separated_unambiguously():
    content = serialize("ab", entry())[SEAL_BYTES:]
    assert same(deserialize("ab", sealed("ab", content), SHAPE), entry())
    shifted = MAGIC + hashlib.sha256((1).to_bytes(8, "big") + b"a" + b"b" + content).digest() + content
    assert deserialize("ab", shifted, SHAPE) is None


ZEROS = PassageKV(torch.zeros(2, 2, 1, 128, 4, dtype=SHAPE.dtype), ("a",))
COMPRESSED = b"".join(KVCodec(compress=True).encode("key", ZEROS))


def decoded(data, shape=ZEROS.shape):
    return KVCodec().decode("key", data, shape)


def test_a_compressed_entry_is_smaller_and_every_codec_decodes_it():
    assert len(COMPRESSED) < ZEROS.n_bytes / 2
    assert same(decoded(COMPRESSED), ZEROS)
    assert same(KVCodec(compress=True).decode("key", serialize("key", ZEROS), ZEROS.shape), ZEROS)


def test_an_entry_that_compression_does_not_make_smaller_is_stored_as_it_is():
    large = entry(0, dataclasses.replace(SHAPE, n_tokens=1000))
    assert b"".join(KVCodec(compress=True).encode("key", large)) == serialize("key", large)


@pytest.mark.parametrize(
    "data",
    [
        COMPRESSED[:-1],
        COMPRESSED + b"\0",
        COMPRESSED[:10],
        COMPRESSED[:4],
        COMPRESSED[:4] + b"\xff" * 50,
        COMPRESSED[:20] + bytes([COMPRESSED[20] ^ 1]) + COMPRESSED[21:],
    ],
)
def test_a_damaged_compressed_entry_is_a_miss(data):
    assert decoded(data) is None


def test_no_more_is_decompressed_than_an_entry_has(monkeypatch):
    asked = []
    decompressobj = zlib.decompressobj

    class Recording:
        def __init__(self):
            self.stream = decompressobj()

        def decompress(self, data, max_bytes):
            content = self.stream.decompress(data, max_bytes)
            asked.append((max_bytes, len(content)))
            return content

        def __getattr__(self, name):
            return getattr(self.stream, name)

    monkeypatch.setattr(zlib, "decompressobj", Recording)
    assert decoded(b"RPKZ" + zlib.compress(bytes(50 * 1024**2), 9)) is None
    assert asked == [(ZEROS.shape.max_serialized_bytes, ZEROS.shape.max_serialized_bytes)]
