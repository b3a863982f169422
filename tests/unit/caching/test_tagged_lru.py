import pytest

from rag_posfix.caching.tagged_lru import TaggedLRU
from rag_posfix.caching.tier import Counters
from tests.support.threads import in_threads


@pytest.fixture
def counters():
    return Counters()


def test_the_least_recently_used_entries_go_first_until_there_is_room(counters):
    lru = TaggedLRU(100, counters)
    for key in ("one", "two", "three", "four"):
        lru.put(key, key, 25)
    assert lru.get("one") == "one"
    lru.put("large", "large", 50)
    assert [key for key, _ in lru.items()] == ["four", "one", "large"]
    assert counters["evictions"] == 2


def test_listing_the_entries_does_not_count_as_use(counters):
    lru = TaggedLRU(100, counters, max_entries=2)
    lru.put("one", 1, 1)
    lru.put("two", 2, 1)
    assert lru.get("one") == 1
    assert dict(lru.items()) == {"one": 1, "two": 2}
    lru.put("three", 3, 1)
    assert dict(lru.items()) == {"one": 1, "three": 3}


def test_a_replaced_entry_frees_its_bytes_and_tags_and_is_no_eviction(counters):
    lru = TaggedLRU(10, counters)
    lru.put("key", "old", 10, ["a"])
    lru.put("key", "new", 4, ["b", "b"])
    stats = lru.stats("name")
    assert (stats.name, stats.entries, stats.bytes, stats.evictions) == ("name", 1, 4, 0)
    assert lru.tags() == {"b"}
    assert lru.delete_tags(["a"]) == 0
    assert lru.delete_tags(["b"]) == 1
    assert lru.tags() == frozenset()
    assert lru.stats("name").bytes == 0


def test_a_value_that_is_too_large_is_not_kept_and_removes_the_old_one(counters):
    lru = TaggedLRU(10, counters)
    lru.put("key", "old", 1, ["tag"])
    lru.put("key", "new", 11, ["tag"])
    assert lru.get("key") is None
    assert lru.tags() == frozenset()


def test_removing_a_value_leaves_what_was_put_in_its_place(counters):
    lru = TaggedLRU(10, counters)
    old, new = object(), object()
    lru.put("key", old, 1)
    lru.put("key", new, 1)
    lru.remove("key", old)
    assert lru.get("key") is new
    lru.remove("key", new)
    assert lru.get("key") is None


def test_the_tags_do_not_outgrow_the_entries(counters):
    lru = TaggedLRU(1000, counters, max_entries=3)
    for number in range(50):
        lru.put(f"key{number % 7}", number, 1, [f"tag{number}"])
    assert lru.tags() == {"tag47", "tag48", "tag49"}
    assert lru.clear() == 3
    assert lru.tags() == frozenset()


def test_closed_it_is_empty_and_stays_so(counters):
    lru = TaggedLRU(10, counters)
    lru.put("key", 1, 1)
    lru.close()
    lru.put("other", 2, 1)
    assert (lru.get("key"), lru.get("other")) == (None, None)


def test_threads_may_share_it(counters):
    lru = TaggedLRU(5, counters)

    def work(seed):
        for number in range(300):
            lru.put(f"key{(number * seed) % 11}", seed, 1, [f"tag{number % 3}", f"tag{number % 5}"])
            lru.get(f"key{number % 11}")
            lru.delete_tags([f"tag{number % 2}"])

    in_threads(work, [1, 2, 3, 5, 7, 8, 9, 10])
    assert lru.stats("name").entries <= 5
    assert lru.stats("name").bytes == lru.stats("name").entries
    lru.delete_tags([f"tag{number}" for number in range(5)])
    assert (lru.items(), lru.tags(), lru.stats("name").bytes) == ([], frozenset(), 0)
