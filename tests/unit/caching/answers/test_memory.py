import pytest

from rag_posfix.caching.answers.memory import MemoryCache
from rag_posfix.caching.answers.tier import ByteCache
from rag_posfix.errors import CacheError
from tests.support.clock import Clock
from tests.support.threads import in_threads


def test_the_tier_follows_the_protocol():
    assert isinstance(MemoryCache(), ByteCache)


@pytest.mark.parametrize("value", [b"", b"answer"])
def test_a_value_comes_back(value):
    cache = MemoryCache()
    assert cache.get("key") is None
    cache.set("key", value, 60)
    assert cache.get("key") == value
    assert (cache.stats().hits, cache.stats().misses, cache.stats().entries) == (1, 1, 1)


def test_an_entry_expires():
    clock = Clock()
    cache = MemoryCache(clock=clock)
    cache.set("key", b"answer", 60)
    clock.advance(59)
    assert cache.get("key") == b"answer"
    clock.advance(1)
    assert cache.get("key") is None
    assert cache.stats().entries == 0


def test_the_least_recently_used_entry_goes_first():
    cache = MemoryCache(max_entries=2)
    cache.set("one", b"1", 60)
    cache.set("two", b"2", 60)
    cache.get("one")
    cache.set("three", b"3", 60)
    assert [cache.get(key) for key in ("one", "two", "three")] == [b"1", None, b"3"]
    assert cache.stats().evictions == 1


def test_bytes_are_bounded():
    cache = MemoryCache(max_bytes=10_000)
    for number in range(100):
        cache.set(f"key{number}", b"x" * 1000, 60, ["tag"])
        assert cache.stats().bytes <= 10_000
    assert cache.get("key99") is not None
    assert cache.delete_tags(["tag"]) == 6


def test_a_value_larger_than_the_tier_is_not_kept_and_replaces_the_old_one():
    cache = MemoryCache(max_bytes=2000)
    cache.set("key", b"old", 60)
    cache.set("key", b"x" * 5000, 60)
    assert cache.get("key") is None


def test_entries_are_dropped_by_tag():
    cache = MemoryCache()
    cache.set("one", b"1", 60, ["a", "b"])
    cache.set("two", b"2", 60, ["b"])
    cache.set("three", b"3", 60)
    assert cache.delete_tags(["a", "b", "unknown"]) == 2
    assert [cache.get(key) for key in ("one", "two", "three")] == [None, None, b"3"]


def test_an_expired_entry_leaves_its_tags():
    clock = Clock()
    cache = MemoryCache(clock=clock)
    cache.set("key", b"old", 60, ["tag"])
    clock.advance(60)
    assert cache.get("key") is None
    assert cache.delete_tags(["tag"]) == 0


def test_clear():
    cache = MemoryCache()
    cache.set("one", b"1", 60, ["a"])
    assert cache.clear() == 1
    assert cache.get("one") is None
    assert cache.delete_tags(["a"]) == 0
    assert cache.stats().bytes == 0


def test_a_closed_cache_only_misses():
    cache = MemoryCache()
    cache.set("key", b"answer", 60)
    cache.close()
    cache.set("other", b"answer", 60)
    assert (cache.get("key"), cache.get("other")) == (None, None)


def test_threads_may_share_it():
    cache = MemoryCache(max_entries=5)

    def work(seed):
        for number in range(300):
            cache.set(f"key{(number * seed) % 11}", b"x", 60, [f"tag{number % 3}"])
            cache.get(f"key{number % 11}")
            cache.delete_tags([f"tag{number % 2}"])

    in_threads(work, [1, 2, 3, 5, 7, 8, 9, 10])
    assert cache.stats().entries <= 5


@pytest.mark.parametrize("bounds", [{"max_entries": 0}, {"max_bytes": 10}])
def test_bounds_that_hold_nothing_are_refused(bounds):
    with pytest.raises(CacheError, match="must be >="):
        MemoryCache(**bounds)
