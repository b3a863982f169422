import sys
from contextlib import closing

import orjson
import pytest

from rag_posfix.caching.answers.tiered import Blob, BlobCodec, TieredAnswerCache, build_answer_cache
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.errors import CacheError, ConfigError
from rag_posfix.settings import CacheSettings
from tests.support.clock import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def memory(clock):
    return MemoryTier(clock=clock)


@pytest.fixture
def disk(tmp_path, clock):
    cache = DiskTier(tmp_path, BlobCodec(), clock=clock, busy_seconds=60)
    yield cache
    cache.close()


@pytest.fixture
def cache(memory, disk, clock):
    return TieredAnswerCache([memory, disk], ttl_seconds=100, clock=clock)


@pytest.mark.parametrize("value", [{}, {"a": [1, 2.5, None, True, {"b": "é\u2028"}]}, {"text": ""}])
def test_an_answer_comes_back(cache, value):
    assert cache.get("key") is None
    cache.put("key", value, ["doc"])
    assert cache.get("key") == value
    stats = cache.stats()
    assert (stats["hits"], stats["misses"]) == (1, 1)
    assert [tier["name"] for tier in stats["tiers"]] == ["memory", "disk"]


def test_the_caller_cannot_change_what_is_stored(cache):
    cache.put("key", {"documents": []})
    cache.get("key")["documents"].append("mine")
    assert cache.get("key") == {"documents": []}


def test_a_hit_is_copied_into_the_faster_tiers_for_the_rest_of_its_life(cache, memory, clock):
    cache.put("key", {"text": "Paris"})
    memory.clear()
    clock.advance(90)
    assert cache.get("key") == {"text": "Paris"}
    assert memory.get_many({"key": None})
    clock.advance(10)
    assert not memory.get_many({"key": None})
    assert cache.get("key") is None


def test_a_copy_can_be_dropped_by_document_as_well(cache, memory):
    cache.put("one", {"text": "1"}, ["a", "b"])
    cache.put("two", {"text": "2"}, ["c"])
    memory.clear()
    cache.get("one")
    assert cache.drop_documents(["b", "unknown"]) == 1
    assert cache.get("one") is None
    assert cache.get("two") == {"text": "2"}
    assert memory.keys() == ["two"], "hits are copied again after a drop"
    assert cache.drop_documents([]) == 0


def test_answers_are_dropped_from_the_slowest_tier_first_and_the_largest_count_is_returned():
    cleared = []

    class Counting(MemoryTier):
        def __init__(self, name, entries):
            super().__init__()
            self.name, self.entries = name, entries

        def clear(self):
            cleared.append(self.name)
            return self.entries

    cache = TieredAnswerCache([Counting("memory", 1), Counting("disk", 5), Counting("redis", 3)])
    assert cache.clear() == 5
    assert cleared == ["redis", "disk", "memory"]


def test_a_large_answer_is_not_kept(memory):
    cache = TieredAnswerCache([memory], max_entry_bytes=100)
    cache.put("key", {"text": "x" * 100})
    assert cache.get("key") is None
    cache.put("key", {"text": "x" * 80})
    assert cache.get("key") is not None
    assert cache.stats()["rejected"] == 1


@pytest.mark.parametrize("value", [{"a": object()}, {1: 2}, {"a": "\ud800"}, {"a": 2**70}])
def test_an_answer_that_is_not_json_is_not_kept(cache, value):
    cache.put("key", value)
    assert cache.get("key") is None
    assert cache.stats()["rejected"] == 1


def envelope(**changes):
    whole = {"version": 1, "key": "key", "expires_at": 1_000_050.0, "tags": [], "value": {"text": "old"}}
    return orjson.dumps({**whole, **changes})


def test_the_envelope_of_these_tests_opens(cache, memory):
    memory.put_many({"key": Blob(envelope())})
    assert cache.get("key") == {"text": "old"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        envelope(value=[1]),
        envelope(key="other"),
        envelope(version=0),
        envelope(tags=[1]),
        envelope(expires_at="soon"),
        envelope()[:-1],
    ],
)
def test_a_damaged_entry_is_a_miss_and_the_next_tier_is_asked(cache, memory, data):
    memory.put_many({"key": Blob(data)})
    assert cache.get("key") is None
    assert cache.stats()["damaged"] == 1
    cache.put("key", {"text": "Paris"})
    memory.put_many({"key": Blob(data)})
    assert cache.get("key") == {"text": "Paris"}


def test_an_entry_that_was_stored_by_a_clock_far_ahead_is_a_miss_and_is_replaced(cache, clock):
    today = clock.now
    clock.now = today + 73 * 365 * 24 * 3600
    cache.put("key", {"text": "old"})
    assert cache.get("key") == {"text": "old"}
    clock.now = today
    assert cache.get("key") is None
    cache.put("key", {"text": "new"})
    clock.now = today - 5  # of another process, a little behind
    assert cache.get("key") == {"text": "new"}


def test_an_entry_past_its_end_is_a_miss(cache, memory):
    memory.put_many({"key": Blob(envelope(expires_at=1.0))})
    assert cache.get("key") is None


def test_a_closed_cache_only_misses(cache):
    cache.put("key", {})
    cache.close()
    assert cache.get("key") is None


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_life_that_is_not_above_zero_is_refused(memory, seconds):
    with pytest.raises(CacheError, match="ttl_seconds"):
        TieredAnswerCache([memory], ttl_seconds=seconds)


def tier_names(cache):
    return [tier["name"] for tier in cache.stats()["tiers"]]


def test_answers_stay_in_memory_by_default(tmp_path):
    with closing(build_answer_cache(CacheSettings(), tmp_path)) as cache:
        cache.put("key", {"text": "Paris"})
        assert tier_names(cache) == ["memory"]
    assert list(tmp_path.iterdir()) == []


def test_a_tier_on_disk_outlives_the_process(tmp_path):
    for stored in (None, {"text": "Paris"}):
        with closing(build_answer_cache(CacheSettings(disk_bytes=10_000_000), tmp_path)) as cache:
            assert tier_names(cache) == ["memory", "disk"]
            assert cache.get("key") == stored
            cache.put("key", {"text": "Paris"})


def test_answers_in_memory_are_served_while_redis_is_away(tmp_path):
    settings = CacheSettings(redis_url="redis://:hush@127.0.0.1:1")
    with closing(build_answer_cache(settings, tmp_path)) as cache:
        assert tier_names(cache) == ["memory", "redis"]
        cache.put("key", {"text": "Paris"})
        assert cache.get("key") == {"text": "Paris"}
        assert "hush" not in repr(cache)


@pytest.mark.parametrize("settings", [{"enabled": False, "redis_url": "hush"}, {"memory_entries": 0, "disk_bytes": 0}])
def test_no_cache_is_built_when_everything_is_off(tmp_path, settings):
    assert build_answer_cache(CacheSettings(**settings), tmp_path) is None


def test_nothing_is_opened_before_the_first_use(tmp_path):
    build_answer_cache(CacheSettings(redis_url="redis://127.0.0.1:1"), tmp_path).close()
    assert not list(tmp_path.iterdir())


def test_an_invalid_url_and_a_missing_package_are_told(tmp_path, monkeypatch):
    with pytest.raises(CacheError, match="redis cache: the URL is not valid"):
        build_answer_cache(CacheSettings(redis_url="hush"), tmp_path)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[redis\]'"):
        build_answer_cache(CacheSettings(redis_url="redis://127.0.0.1"), tmp_path)


def test_the_largest_answer_fits_through_every_tier(tmp_path):
    settings = CacheSettings(memory_entries=0, disk_bytes=10_000_000, max_entry_bytes=50_000)
    with closing(build_answer_cache(settings, tmp_path)) as cache:
        cache.put("key", {"text": "x" * 49_000}, [f"document {number}" for number in range(100)])
        assert cache.get("key") is not None
