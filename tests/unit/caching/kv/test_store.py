import dataclasses
import hashlib
import json
import logging
import math
import subprocess
import sys
import threading
import zlib
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv import store as kv_store
from rag_posfix.caching.kv.store import (
    KVCodec,
    PassageKV,
    PassageStore,
    WriteBehind,
    allocate,
    build_passage_store,
    deserialize,
    passage_key,
    serialize,
    serialize_parts,
)
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.errors import CacheError, ConfigError
from rag_posfix.settings import PassageStoreSettings
from tests.support.passages import SHAPE, entry, same
from tests.support.threads import in_threads
from tests.support.waiting import wait_until

SECONDS = 60  # enough on a busy machine; nothing waits that long if all is well


class Slow(MemoryTier):
    """A tier that is written behind the answer, with a gate before each write and each search."""

    is_synchronous = False
    name = "slow"

    def __init__(self):
        super().__init__()
        self.writes, self.searches = threading.Event(), threading.Event()
        self.writes.set()
        self.searches.set()
        self.asked, self.writing = threading.Event(), threading.Event()
        self.written_by = set()

    def put_many(self, entries):
        self.writing.set()
        assert self.writes.wait(SECONDS)
        self.written_by.add(threading.current_thread().name)
        super().put_many(entries)

    def get_many(self, keys):
        found = super().get_many(keys)
        self.asked.set()
        assert self.searches.wait(SECONDS)
        return found


class Broken:
    """A tier that fails whatever it is asked."""

    name = "broken"

    def __init__(self, is_synchronous):
        self.is_synchronous = is_synchronous
        self.works = False

    def __getattr__(self, operation):
        def fail(*_arguments):
            if not self.works:
                raise RuntimeError("the value was: secret")
            return {}

        return fail


@pytest.fixture
def memory():
    return MemoryTier()


@pytest.fixture
def slow():
    return Slow()


@pytest.fixture
def store(memory, slow):
    store = PassageStore([memory, slow])
    yield store
    slow.writes.set()
    slow.searches.set()
    store.close()


def get(store, *keys):
    return store.get_many(dict.fromkeys(keys, SHAPE))


def test_memory_alone():
    store = PassageStore([MemoryTier()])
    assert get(store, "key") == {}
    store.put_many({"key": entry(1)}, {"key": ["doc"]})
    assert same(get(store, "key")["key"], entry(1, tags=("doc",)))
    stats = store.stats()
    assert (stats["hits"], stats["misses"], stats["hit_bytes"]) == (1, 1, SHAPE.n_bytes)
    assert (stats["dropped_writes"], stats["pending_writes"], stats["errors"]) == (0, 0, 0)
    assert [tier["name"] for tier in stats["tiers"]] == ["memory"]
    assert stats["bytes"] == stats["tiers"][0]["bytes"] > 0
    assert store.flush(0)
    assert store.drop(["doc"]) == 1
    assert store.clear() == 0
    store.close()
    store.put_many({"key": entry(1)})
    assert get(store, "key") == {}


def test_a_view_of_a_batch_does_not_keep_the_batch_alive(memory):
    batch = torch.zeros(9, *SHAPE.sizes, dtype=SHAPE.dtype)
    PassageStore([memory]).put_many({"key": PassageKV(batch[3])})
    kept = memory.get_many({"key": SHAPE})["key"]
    assert kept.kv.untyped_storage().nbytes() == kept.n_bytes


def test_writes_that_the_queue_has_no_room_for_are_dropped_and_counted(memory, slow):
    store = PassageStore([memory, slow], queue_bytes=SHAPE.n_bytes)
    slow.writes.clear()
    store.put_many({"first": entry()})
    assert slow.writing.wait(SECONDS), "the first entry must leave the queue"
    store.put_many({f"key{number}": entry() for number in range(4)})
    assert (store.stats()["dropped_writes"], store.stats()["pending_writes"]) == (3, 2)
    assert memory.stats().entries == 5
    slow.writes.set()
    assert store.flush(SECONDS)
    assert slow.stats().entries == 2
    assert slow.written_by == {"rag-posfix-passages"}
    store.close()


def test_a_hit_of_the_last_tier_is_copied_into_those_between(memory):
    between, last = Slow(), Slow()
    store = PassageStore([memory, between, last])
    last.put_many({"key": entry(1, tags=("doc",))})
    assert get(store, "key")
    assert store.flush(SECONDS)
    assert same(between.get_many({"key": SHAPE})["key"], entry(1, tags=("doc",)))
    assert (last.stats().hits, memory.stats().entries) == (1, 1)
    assert store.drop(["doc"]) == 1
    assert get(store, "key") == {}
    store.close()


def test_a_tier_is_asked_only_for_what_those_before_it_lack(store, memory, slow):
    memory.put_many({"one": entry(1)})
    slow.put_many({"two": entry(2)})
    assert set(get(store, "one", "two", "three")) == {"one", "two"}
    assert (slow.stats().hits, slow.stats().misses) == (1, 1)
    assert (store.stats()["hits"], store.stats()["misses"]) == (2, 1)
    get(store, "one")
    assert (slow.stats().hits, slow.stats().misses) == (1, 1)


def test_an_entry_that_is_not_as_expected_is_a_miss_and_the_next_tier_is_asked(store, memory, slow):
    other = dataclasses.replace(SHAPE, dtype=torch.float16)
    memory.put_many({"key": entry(1, other)})
    slow.put_many({"key": entry(2)})
    assert same(get(store, "key")["key"], entry(2))


def test_what_waits_to_be_written_is_dropped_too(store, slow):
    slow.writes.clear()
    store.put_many({"first": entry()})
    store.put_many({"a": entry(1), "b": entry(2)}, {"a": ["doc"], "b": ["other"]})
    threading.Timer(0.05, slow.writes.set).start()
    assert store.drop(["doc"]) == 1
    assert store.flush(SECONDS)
    assert set(slow.get_many(dict.fromkeys(("first", "a", "b"), SHAPE))) == {"first", "b"}


def test_a_search_under_way_does_not_bring_back_what_is_dropped(store, memory, slow):
    slow.put_many({"key": entry(1, tags=("doc",))})
    slow.searches.clear()
    search = threading.Thread(target=get, args=(store, "key"))
    search.start()
    assert slow.asked.wait(SECONDS)
    store.drop(["doc"])
    slow.searches.set()
    search.join()
    assert store.flush(SECONDS)
    assert memory.stats().entries == 0
    assert get(store, "key") == {}


def test_a_search_begun_during_a_drop_does_not_bring_back_what_is_dropped():
    class ReadDuringADrop(Slow):
        """A search has read the entry, and not returned it, when the entry is deleted here."""

        def delete_tags(self, tags):
            self.searches.clear()
            search.start()
            assert self.asked.wait(SECONDS)
            return super().delete_tags(tags)

    class ReturnedDuringADrop(MemoryTier):
        """The search returns the entry after the entry was deleted here, and before the drop ends."""

        def delete_tags(self, tags):
            deleted = super().delete_tags(tags)
            slow.searches.set()
            search.join(SECONDS)
            return deleted

    memory, slow = ReturnedDuringADrop(), ReadDuringADrop()
    store = PassageStore([memory, slow])
    slow.put_many({"key": entry(1, tags=("doc",))})
    search = threading.Thread(target=get, args=(store, "key"))
    assert store.drop(["doc"]) == 1
    assert not search.is_alive()
    assert memory.stats().entries == 0
    assert get(store, "key") == {}
    store.close()


def test_clear_empties_every_tier(store, memory, slow):
    store.put_many({"one": entry(1), "two": entry(2)})
    assert store.clear() == 2
    assert memory.stats().entries == slow.stats().entries == 0
    store.put_many({"one": entry(1)})
    assert store.flush(SECONDS)
    assert slow.stats().entries == 1


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_a_broken_tier_is_skipped_and_logged_once(memory, caplog, is_synchronous):
    broken = Broken(is_synchronous)
    store = PassageStore([broken, memory])
    for _ in range(3):
        store.put_many({"key": entry(1)}, {"key": ["doc"]})
        assert same(get(store, "key")["key"], entry(1, tags=("doc",)))
    assert store.flush(SECONDS)
    assert store.drop(["doc"]) == 1
    assert store.clear() == 0
    assert store.stats()["tiers"][0] == {"name": "broken"}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "passage KV store: the broken tier is failing (RuntimeError)" in caplog.text
    assert "secret" not in caplog.text
    broken.works = True
    get(store, "key")
    assert "passage KV store: the broken tier works again" in caplog.text
    store.close()


def test_no_memory_left_for_a_copy_is_a_miss_and_counted(store, memory, slow, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    slow.put_many({"key": entry(1)})
    monkeypatch.setattr(PassageKV, "on", fail)
    assert get(store, "key") == {}
    store.put_many({"other": entry(2)})
    assert store.stats()["errors"] == 2
    assert memory.stats().entries == 0
    monkeypatch.undo()
    assert get(store, "key")


def test_a_store_without_tiers_is_refused():
    with pytest.raises(CacheError, match="needs at least one tier"):
        PassageStore([])


def test_threads_put_get_and_drop_and_every_hit_is_what_was_put(memory, slow):
    small = MemoryTier(max_bytes=6 * 1200)  # so that it evicts all the time
    store = PassageStore([small, slow])
    entries = {f"key{number}": entry(number) for number in range(12)}
    tags = {key: [f"tag{number % 4}"] for number, key in enumerate(entries)}
    wrong = []

    def work(seed):
        for number in range(60):
            some = [f"key{(number * seed + step) % 12}" for step in range(4)]
            store.put_many({key: entries[key] for key in some[:2]}, tags)
            for key, kept in get(store, *some).items():
                if not torch.equal(kept.kv.view(torch.uint8), entries[key].kv.view(torch.uint8)):
                    wrong.append(key)
            if number % 9 == 0:
                store.drop([f"tag{number % 4}"])
            if number % 25 == 0:
                store.clear()

    in_threads(work, [1, 5, 7, 11])
    assert not wrong
    assert store.flush(SECONDS)
    assert store.drop(["tag0", "tag1", "tag2", "tag3"]) <= 12
    assert get(store, *entries) == {}
    store.close()


def test_tensors_of_inference_mode_are_kept_and_written_like_others(tmp_path):
    with torch.inference_mode():
        kv = torch.arange(2 * SHAPE.n_bytes // 2, dtype=SHAPE.dtype).reshape(2, *SHAPE.sizes)[1]
    memory = MemoryTier()
    store = PassageStore([memory, DiskTier(tmp_path, KVCodec(), max_bytes=10**6)])
    store.put_many({"key": PassageKV(kv)})
    assert store.flush(SECONDS)
    for _ in range(2):
        assert torch.equal(get(store, "key")["key"].kv, kv)
        memory.clear()
    store.close()


def test_the_memory_tags_are_those_in_memory(store, memory, slow):
    store.put_many({"a": entry(1), "b": entry(2)}, {"a": ("x", "y"), "b": ("z",)})
    assert store.flush(SECONDS)
    assert store.memory_tags() == {"x", "y", "z"}
    memory.delete_tags(["x"])
    assert store.memory_tags() == {"z"}
    assert PassageStore([Broken(is_synchronous=True)]).memory_tags() == frozenset()


def tier_names(store):
    return [tier["name"] for tier in store.stats()["tiers"]]


REDIS = {"memory_bytes": 5000, "disk_bytes": 10**6, "redis_url": "redis://:hush@127.0.0.1:1"}


@pytest.mark.parametrize(
    ("settings", "names"),
    [({}, ["memory"]), ({"disk_bytes": 10**6}, ["memory", "disk"]), (REDIS, ["memory", "disk", "redis"])],
)
def test_a_tier_is_built_when_it_has_bytes_or_a_url(tmp_path, settings, names):
    for is_stored in (False, "disk" in names):
        with closing(build_passage_store(PassageStoreSettings(**settings), tmp_path, "cpu")) as store:
            assert ("key" in get(store, "key")) is is_stored
            store.put_many({"key": entry(1)})
            assert tier_names(store) == names
            assert same(get(store, "key")["key"], entry(1))
            assert "hush" not in repr(store)
            assert store.flush(SECONDS)
    assert [path.name for path in tmp_path.iterdir()] == ["passages"] * ("disk" in names)


@pytest.mark.parametrize("settings", [{"enabled": False}, {"memory_bytes": 0}])
def test_no_store_is_built_when_everything_is_off(tmp_path, settings):
    assert build_passage_store(PassageStoreSettings(**settings), tmp_path) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_bytes": 10}, r"memory tier: max_bytes=10 must be >= 4096 .* set 0 in the settings"),
        ({"disk_bytes": 10}, r"passage KV store on disk: max_bytes=10 must be >= 65536; set 0 in the settings"),
        ({"redis_url": "hush"}, "the URL is not valid"),
    ],
)
def test_an_invalid_setting_is_a_cache_error(tmp_path, settings, message):
    with pytest.raises(CacheError, match=message):
        build_passage_store(PassageStoreSettings(**settings), tmp_path)


def test_without_redis_py_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[redis\]'"):
        build_passage_store(PassageStoreSettings(redis_url="redis://127.0.0.1"), tmp_path)


def test_looking_into_a_store_loads_no_torch(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from rag_posfix.caching.kv.store import build_passage_store\n"
        "from rag_posfix.settings import PassageStoreSettings\n"
        "store = build_passage_store(PassageStoreSettings(disk_bytes=10**6), pathlib.Path(sys.argv[1]))\n"
        "store.stats(); store.clear(); store.close()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


class SlowWriter:
    """A writer that waits at a gate and remembers what it wrote."""

    def __init__(self):
        self.gate = threading.Event()
        self.began = threading.Event()
        self.written = []

    def __call__(self, entries, n_tiers):
        self.began.set()
        assert self.gate.wait(SECONDS)
        self.written.extend((key, n_tiers) for key in entries)


def writers():
    """Return the threads that write behind."""
    return {thread for thread in threading.enumerate() if thread.name == "rag-posfix-passages"}


def test_adding_does_not_wait_and_flush_does():
    slow = SlowWriter()
    behind = WriteBehind(slow, max_bytes=10_000)
    assert behind.add({"one": entry(), "two": entry()}, 2) == 0
    assert behind.add({"three": entry()}, 1) == 0
    assert not behind.flush(0.05)
    assert not slow.written
    assert behind.pending == 3
    slow.gate.set()
    assert behind.flush(SECONDS)
    assert slow.written == [("one", 2), ("two", 2), ("three", 1)]
    assert behind.pending == 0


def test_no_thread_runs_before_the_first_entry():
    before = writers()
    behind = WriteBehind(lambda *_: None, max_bytes=1)
    behind.add({}, 1)
    assert writers() == before
    assert behind.flush(0)
    behind.close(0)


def test_what_the_queue_has_no_room_for_is_refused():
    slow = SlowWriter()
    behind = WriteBehind(slow, max_bytes=3 * SHAPE.n_bytes)
    behind.add({"first": entry()}, 1)
    assert slow.began.wait(SECONDS)
    assert behind.add({f"key{number}": entry() for number in range(5)}, 1) == 2
    slow.gate.set()
    assert behind.flush(SECONDS)
    assert [key for key, _ in slow.written] == ["first", "key0", "key1", "key2"]
    assert behind.add({"later": entry()}, 1) == 0
    assert behind.flush(SECONDS)


def test_an_entry_larger_than_the_queue_is_written_when_nothing_waits():
    slow = SlowWriter()
    behind = WriteBehind(slow, max_bytes=1)
    slow.gate.set()
    assert behind.add({"key": entry()}, 1) == 0
    assert behind.flush(SECONDS)
    assert slow.written == [("key", 1)]


def test_what_is_cancelled_is_not_written():
    slow = SlowWriter()
    behind = WriteBehind(slow, max_bytes=10_000)
    behind.add({"first": entry()}, 1)
    assert slow.began.wait(SECONDS)
    behind.add({"a": entry(tags=("x",)), "b": entry(tags=("y",)), "c": entry(tags=("x", "y"))}, 1)
    threading.Timer(0.05, slow.gate.set).start()
    behind.cancel(["x"])
    assert ("first", 1) in slow.written, "cancel must wait for the write under way"
    assert behind.flush(SECONDS)
    assert slow.written == [("first", 1), ("b", 1)]


def test_everything_can_be_cancelled():
    slow = SlowWriter()
    behind = WriteBehind(slow, max_bytes=10_000)
    behind.add({"first": entry()}, 1)
    assert slow.began.wait(SECONDS)
    behind.add({"a": entry(), "b": entry()}, 1)
    threading.Timer(0.05, slow.gate.set).start()
    behind.cancel()
    assert slow.written == [("first", 1)]
    assert behind.pending == 0


def test_close_writes_what_waits_and_refuses_the_rest():
    slow = SlowWriter()
    slow.gate.set()
    behind = WriteBehind(slow, max_bytes=10_000)
    before = writers()
    behind.add({"key": entry()}, 1)
    behind.close(SECONDS)
    assert slow.written == [("key", 1)]
    assert writers() <= before, "the thread must have ended"
    assert behind.add({"other": entry()}, 1) == 1


def test_close_does_not_wait_longer_than_it_may():
    slow = SlowWriter()
    behind = WriteBehind(slow, max_bytes=10_000)
    behind.add({"key": entry()}, 1)
    behind.close(0.1)
    assert slow.written == [], "the writer still waits"
    slow.gate.set()


def test_tensors_are_let_go_once_written():
    import weakref

    behind = WriteBehind(lambda *_: None, max_bytes=10_000)
    kept = entry()
    kv = weakref.ref(kept.kv)
    behind.add({"key": kept}, 1)
    del kept
    assert behind.flush(SECONDS)
    wait_until(lambda: kv() is None)


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
        foreign({"other": KV}, TAGS),
        foreign({"kv": KV}, None),
        foreign({"kv": KV}, {"tags": "[1]"}),
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


texts = st.text(max_size=6)
tokens = st.lists(st.integers(0, 50_000) | st.integers(-(2**63), 2**63 - 1), max_size=6)
encodings = st.recursive(
    st.none() | st.booleans() | texts | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {
        "model_fingerprint": texts,
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        "encoding": encodings,
        "prefix_tokens": tokens,
        "tokens": tokens,
        "salt": texts,
    }
)
KEY = {
    "model_fingerprint": "model",
    "dtype": torch.bfloat16,
    "encoding": ("start", 12.0, None, (1.0, 1.5)),
    "prefix_tokens": [1, 2, 3],
    "tokens": [4, 5],
    "salt": "tenant",
}


def typed(encoding):
    """``encoding`` with its types: 1, 1.0 and True are equal in Python."""
    if isinstance(encoding, tuple):
        return tuple(map(typed, encoding))
    return (type(encoding), encoding)


def test_the_key_does_not_depend_on_the_process():
    # Entries of a running store are lost where this changes; raise SCHEMA_VERSION then.
    assert passage_key(**KEY) == "1f02e24748e72cb930be581e76b8759966b13747f60742d5fb9b023fd28c41b0"


@given(arguments, arguments)
@pytest.mark.slow
def test_two_keys_are_equal_only_if_everything_is(one, two):
    equal = {**one, "encoding": typed(one["encoding"])} == {**two, "encoding": typed(two["encoding"])}
    assert (passage_key(**one) == passage_key(**two)) == equal


@given(arguments, arguments, st.sampled_from(sorted(KEY)))
def test_each_argument_alone_changes_the_key(one, two, name):
    other = {**one, name: two[name]}
    equal = typed(one[name]) == typed(two[name]) if name == "encoding" else one[name] == two[name]
    assert (passage_key(**one) == passage_key(**other)) == equal


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_the_boundary_between_prefix_and_passage_counts(both, first, second):
    one, two = (
        passage_key(**{**KEY, "prefix_tokens": both[:cut], "tokens": both[cut:]})
        for cut in (min(first, len(both)), min(second, len(both)))
    )
    assert (one == two) == (min(first, len(both)) == min(second, len(both)))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("ab", "c"), ("a", "bc")),
        ((), None),
        ("", None),
        ("1", 1),
        (1, 1.0),
        (True, 1),
        ((1, (2, 3)), (1, 2, 3)),
    ],
)
def test_encodings_that_look_alike_are_different(one, two):
    assert passage_key(**{**KEY, "encoding": one}) != passage_key(**{**KEY, "encoding": two})


def test_encodings_that_mean_the_same_are_the_same():
    assert passage_key(**{**KEY, "encoding": -0.0}) == passage_key(**{**KEY, "encoding": 0.0})
    nan = passage_key(**{**KEY, "encoding": math.nan})
    assert nan == passage_key(**{**KEY, "encoding": float("nan")})


def test_the_schema_version_changes_the_key(monkeypatch):
    before = passage_key(**KEY)
    monkeypatch.setattr(kv_store, "SCHEMA_VERSION", kv_store.SCHEMA_VERSION + 1)
    assert passage_key(**KEY) != before


@pytest.mark.parametrize("encoding", [[1], {"a": 1}, b"a", torch.tensor(1.0), (1, [2])])
def test_an_encoding_that_is_no_plain_data_is_rejected(encoding):
    with pytest.raises(CacheError, match="allowed: str, int, float, bool, None and tuples"):
        passage_key(**{**KEY, "encoding": encoding})


@pytest.mark.parametrize("wrong", [[2**63], [1.5], ["a"]])
def test_a_token_that_is_no_integer_is_refused(wrong):
    with pytest.raises(CacheError, match="tokens must be 64-bit integers"):
        passage_key(**{**KEY, "tokens": wrong})
