import dataclasses

import pytest

from rag_posfix.caching.kv.memory import MemoryPassages
from rag_posfix.caching.kv.tier import PassageTier
from rag_posfix.errors import CacheError
from tests.support.passages import SHAPE, entry, same
from tests.support.threads import in_threads

ONE = 1024 + SHAPE.n_bytes  # what an entry counts as


def test_the_tier_follows_the_protocol():
    assert isinstance(MemoryPassages(), PassageTier)


def test_entries_come_back_as_the_same_tensors():
    tier = MemoryPassages()
    kept = entry(1)
    assert tier.get_many({"one": SHAPE}) == {}
    tier.put_many({"one": kept, "two": entry(2)})
    found = tier.get_many({"one": SHAPE, "two": SHAPE, "three": SHAPE})
    assert found["one"].states is kept.states
    assert set(found) == {"one", "two"}
    stats = tier.stats()
    assert (stats.hits, stats.misses, stats.entries, stats.bytes) == (2, 2, 2, 2 * ONE)


def test_bytes_are_bounded_and_the_least_recently_used_entry_goes_first():
    tier = MemoryPassages(max_bytes=4 * ONE)
    for number in range(4):
        tier.put_many({f"key{number}": entry(number)})
    assert tier.get_many({"key0": SHAPE})
    tier.put_many({"key4": entry(4)})
    held = tier.get_many({f"key{number}": SHAPE for number in range(5)})
    assert set(held) == {"key0", "key2", "key3", "key4"}
    assert tier.stats().bytes <= 4 * ONE
    assert tier.stats().evictions == 1


def test_a_large_entry_takes_the_place_of_several():
    tier = MemoryPassages(max_bytes=4 * ONE)
    tier.put_many({f"key{number}": entry(number) for number in range(4)})
    large = dataclasses.replace(SHAPE, n_tokens=SHAPE.n_tokens * 20)
    tier.put_many({"large": entry(9, large)})
    assert tier.stats().evictions == 3
    assert same(tier.get_many({"large": large})["large"], entry(9, large))


def test_an_entry_larger_than_the_tier_is_not_kept_and_replaces_the_old_one():
    tier = MemoryPassages(max_bytes=4096)
    tier.put_many({"key": entry()})
    large = dataclasses.replace(SHAPE, n_tokens=1000)
    tier.put_many({"key": entry(0, large)})
    assert tier.get_many({"key": large}) == {}
    assert tier.stats().entries == 0


def test_an_entry_that_is_not_as_expected_is_a_miss_counted_and_dropped():
    tier = MemoryPassages()
    tier.put_many({"key": entry()})
    assert tier.get_many({"key": dataclasses.replace(SHAPE, n_tokens=4)}) == {}
    assert (tier.stats().corrupt, tier.stats().misses, tier.stats().entries) == (1, 1, 0)


def test_entries_are_dropped_by_tag():
    tier = MemoryPassages()
    tier.put_many({"one": entry(1, tags=("a", "b")), "two": entry(2, tags=("b",)), "three": entry(3)})
    assert tier.delete_tags(["a", "b", "unknown"]) == 2
    assert set(tier.get_many(dict.fromkeys(("one", "two", "three"), SHAPE))) == {"three"}


def test_clear_and_close():
    tier = MemoryPassages()
    tier.put_many({"key": entry()})
    assert tier.clear() == 1
    assert tier.get_many({"key": SHAPE}) == {}
    tier.close()
    tier.put_many({"key": entry()})
    assert tier.get_many({"key": SHAPE}) == {}


def test_threads_may_share_it():
    tier = MemoryPassages(max_bytes=5 * ONE)
    entries = {f"key{number}": entry(number, tags=(f"tag{number % 3}",)) for number in range(11)}
    wrong = []

    def work(seed):
        for number in range(200):
            key = f"key{(number * seed) % 11}"
            tier.put_many({key: entries[key]})
            found = tier.get_many(dict.fromkeys(entries, SHAPE))
            wrong.extend(k for k, kept in found.items() if kept is not entries[k])
            tier.delete_tags([f"tag{number % 2}"])

    in_threads(work, [1, 2, 3, 5, 7, 8])
    assert not wrong
    assert tier.stats().entries <= 5
    tier.delete_tags(["tag0", "tag1", "tag2"])
    assert (tier.stats().entries, tier.stats().bytes) == (0, 0)


def test_a_bound_that_holds_nothing_is_refused():
    with pytest.raises(CacheError, match=r"max_bytes=10 must be >= 4096"):
        MemoryPassages(max_bytes=10)
