import dataclasses

import pytest

from rag_posfix.caching.answers.tiered import Blob
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.errors import CacheError
from tests.support.clock import Clock
from tests.support.passages import SHAPE, entry, same
from tests.support.threads import in_threads

SIZE = 1024 + SHAPE.n_bytes  # what an entry counts


def get(tier, *keys, shape=SHAPE):
    return tier.get_many(dict.fromkeys(keys, shape))


def test_entries_come_back_as_the_same_tensors():
    tier = MemoryTier()
    stored = entry(1)
    tier.put_many({"one": stored, "two": entry(2)})
    hits = get(tier, "one", "two", "three")
    assert hits["one"].kv is stored.kv
    assert set(hits) == {"one", "two"}
    stats = tier.stats()
    assert (stats.name, stats.hits, stats.misses, stats.entries, stats.bytes) == ("memory", 2, 1, 2, 2 * SIZE)


def test_an_entry_expires_and_leaves_its_tags():
    clock = Clock()
    tier = MemoryTier(clock=clock)
    tier.put_many({"key": Blob(b"answer", ("tag",), clock.now + 60)})
    clock.advance(59)
    assert tier.keys() == ["key"]
    assert get(tier, "key")
    clock.advance(1)
    assert tier.keys() == []
    assert get(tier, "key") == {}
    assert (tier.stats().entries, tier.stats().corrupt) == (0, 0)
    assert tier.delete_tags(["tag"]) == 0


def test_the_least_recently_used_entries_are_evicted_until_a_new_one_fits():
    tier = MemoryTier(max_bytes=4 * SIZE)
    tier.put_many({f"key{number}": entry(number) for number in range(4)})
    assert get(tier, "key0")
    tier.put_many({"key4": entry(4)})
    assert tier.keys() == ["key0", "key2", "key3", "key4"]
    assert tier.stats().evictions == 1
    large = dataclasses.replace(SHAPE, n_tokens=SHAPE.n_tokens * 20)
    tier.put_many({"large": entry(9, large)})
    assert tier.stats().evictions == 4
    assert same(get(tier, "large", shape=large)["large"], entry(9, large))
    assert tier.stats().bytes <= 4 * SIZE


def test_the_number_of_entries_is_limited_and_listing_the_keys_is_no_use_of_them():
    tier = MemoryTier(max_entries=2)
    tier.put_many({"one": Blob(b"1"), "two": Blob(b"2")})
    get(tier, "one")
    assert tier.keys("t") == ["two"]
    tier.put_many({"three": Blob(b"3")})
    assert tier.keys() == ["one", "three"]
    assert tier.stats().evictions == 1


def test_a_replaced_entry_frees_its_bytes_and_tags_and_is_no_eviction():
    tier = MemoryTier()
    tier.put_many({"key": Blob(b"old" * 100, ("a",))})
    tier.put_many({"key": Blob(b"new", ("b", "b"))})
    assert (tier.stats().entries, tier.stats().bytes, tier.stats().evictions) == (1, 1024 + 3, 0)
    assert tier.tags() == {"b"}
    assert tier.delete_tags(["a"]) == 0
    assert tier.delete_tags(["b"]) == 1
    assert (tier.tags(), tier.stats().bytes) == (frozenset(), 0)


def test_an_entry_larger_than_the_tier_is_not_kept_and_removes_the_old_one():
    tier = MemoryTier(max_bytes=4096)
    tier.put_many({"key": Blob(b"old", ("tag",))})
    tier.put_many({"key": Blob(b"x" * 5000, ("tag",))})
    assert (get(tier, "key"), tier.tags()) == ({}, frozenset())


def test_an_entry_that_is_not_as_expected_is_a_miss_counted_and_dropped():
    tier = MemoryTier()
    tier.put_many({"key": entry()})
    assert get(tier, "key", shape=dataclasses.replace(SHAPE, n_tokens=4)) == {}
    assert (tier.stats().corrupt, tier.stats().misses, tier.stats().entries) == (1, 1, 0)


def test_entries_are_dropped_by_tag():
    tier = MemoryTier()
    tier.put_many({"one": Blob(b"1", ("a", "b")), "two": Blob(b"2", ("b",)), "three": Blob(b"3")})
    assert tier.delete_tags(["a", "b", "unknown"]) == 2
    assert tier.keys() == ["three"]


def test_the_tags_do_not_outgrow_the_entries():
    tier = MemoryTier(max_entries=3)
    for number in range(50):
        tier.put_many({f"key{number % 7}": Blob(b"x", (f"tag{number}",))})
    assert tier.tags() == {"tag47", "tag48", "tag49"}
    assert tier.clear() == 3
    assert (tier.tags(), tier.stats().bytes) == (frozenset(), 0)


def test_a_closed_tier_only_misses():
    tier = MemoryTier()
    tier.put_many({"key": Blob(b"answer")})
    tier.close()
    tier.put_many({"other": Blob(b"answer")})
    assert get(tier, "key", "other") == {}


def test_threads_may_share_it():
    tier = MemoryTier(max_bytes=5 * SIZE)
    entries = {f"key{number}": entry(number, tags=(f"tag{number % 3}",)) for number in range(11)}
    wrong = []

    def work(seed):
        for number in range(200):
            key = f"key{(number * seed) % 11}"
            tier.put_many({key: entries[key]})
            wrong.extend(k for k, hit in get(tier, *entries).items() if hit is not entries[k])
            tier.delete_tags([f"tag{number % 2}"])

    in_threads(work, [1, 2, 3, 5, 7, 8])
    assert not wrong
    assert tier.stats().entries <= 5
    tier.delete_tags(["tag0", "tag1", "tag2"])
    assert (tier.stats().entries, tier.stats().bytes, tier.tags()) == (0, 0, frozenset())


@pytest.mark.parametrize("limits", [{"max_entries": 0}, {"max_bytes": 10}])
def test_limits_that_hold_nothing_are_rejected(limits):
    with pytest.raises(CacheError, match=r"memory tier: max_bytes=.* must be >= 4096 .* set 0 in the settings"):
        MemoryTier(**limits)
