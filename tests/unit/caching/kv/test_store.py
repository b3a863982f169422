import dataclasses
import logging
import subprocess
import sys
import threading
from contextlib import closing

import pytest
import torch

from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv.store import KVCodec, PassageKV, PassageStore, build_passage_store
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.errors import CacheError, ConfigError
from rag_posfix.settings import PassageStoreSettings
from tests.support.passages import SHAPE, entry, same
from tests.support.threads import in_threads

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


def test_memory_alone_is_built_by_default(tmp_path):
    with closing(build_passage_store(PassageStoreSettings(), tmp_path, "cpu")) as store:
        store.put_many({"key": entry(1)})
        assert tier_names(store) == ["memory"]
        assert same(get(store, "key")["key"], entry(1))
    assert not list(tmp_path.iterdir())


def test_a_disk_tier_is_built_when_it_has_bytes(tmp_path):
    settings = PassageStoreSettings(disk_bytes=10**6)
    with closing(build_passage_store(settings, tmp_path)) as store:
        store.put_many({"key": entry(1)})
        assert tier_names(store) == ["memory", "disk"]
    assert [path.name for path in tmp_path.iterdir()] == ["passages"]
    with closing(build_passage_store(settings, tmp_path)) as store:
        assert same(get(store, "key")["key"], entry(1))


def test_redis_is_built_when_it_has_a_url(tmp_path):
    settings = PassageStoreSettings(memory_bytes=5000, disk_bytes=10**6, redis_url="redis://:hush@127.0.0.1:1")
    with closing(build_passage_store(settings, tmp_path)) as store:
        assert tier_names(store) == ["memory", "disk", "redis"]
        store.put_many({"key": entry(1)})
        assert get(store, "key")
        assert "hush" not in repr(store)


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
