"""The passage KV store while Redis is down, faulty, paused or full: misses, counted and cheap, and never an error."""

import dataclasses
from contextlib import closing

import pytest

from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv.store import KVCodec, PassageStore, serialize
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import CircuitBreaker, MemoryTier
from tests.support import faulty_server as faulty
from tests.support.clock import Clock
from tests.support.passages import SHAPE, entry, get, open_tier, same
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SECONDS = 60  # enough on a busy machine; nothing waits that long if all is well
HUGE = dataclasses.replace(SHAPE, layers=30, heads=3, head_dim=64, n_tokens=150)  # 3.3 MiB: two per round trip


def assert_only_misses(tier):
    tier.put_many({"key": entry(1)})
    assert tier.get_many({"key": SHAPE, "other": SHAPE}) == {}
    stats = tier.stats()
    assert stats.misses == 0, "it could not be asked"
    assert stats.errors >= 1
    assert not stats.available
    assert (stats.entries, stats.bytes) == (None, None)


def test_redis_down_is_a_miss_counted_and_cheap(caplog):
    with RedisServer() as server:
        server.stop()
        with open_tier(server, breaker=CircuitBreaker(clock=Clock())) as tier:
            assert_only_misses(tier)
            for _ in range(100):
                assert tier.get_many({"key": SHAPE}) == {}
                tier.put_many({"key": entry()})
            assert tier.stats().errors == 1
            assert tier.delete_tags(["a"]) == tier.clear() == 0
    assert sum("is failing" in record.message for record in caplog.records) == 1


def test_counting_a_large_index_does_not_make_redis_count_as_down():
    with RedisServer() as server, open_tier(server, timeout_seconds=0.05) as tier:
        wait_until(lambda: tier.put_many({"key": entry(1)}) or get(tier, "key") is not None)
        errors = tier.stats().errors
        server.command("CLIENT", "PAUSE", "200")  # as a scan of many entries takes: longer than a look-up may
        stats = tier.stats()
        assert (stats.entries, stats.errors, stats.available) == (1, errors, True)
        wait_until(lambda: same(get(tier, "key"), entry(1)), SECONDS)


def test_what_came_before_the_deadline_is_used(redis_server):
    entries = {f"key{number}": entry(number, HUGE) for number in range(8)}
    with open_tier(redis_server, timeout_seconds=30) as tier:
        tier.put_many(entries)
    one = len(serialize("key0", entries["key0"]))
    relay = faulty.StallingRelay(redis_server.port, free_bytes=4 * one + 1000)  # the replies of two round trips
    with faulty.faulty_server(relay) as url, closing(RedisTier(url, KVCodec(), timeout_seconds=3)) as tier:
        found = tier.get_many(dict.fromkeys(entries, HUGE))
        assert list(found) == ["key0", "key1", "key2", "key3"]
        assert all(same(found[key], entries[key]) for key in found)
        stats = tier.stats()
        assert (stats.hits, stats.misses, stats.errors) == (4, 0, 1)
        relay.resume.set()
        wait_until(lambda: relay.passed > 6 * one)
        tier.close()
        assert relay.requests.count(b"ZADD") == 3, "the search must not continue in the background"


def test_the_store_with_every_tier(redis_server, tmp_path):
    def open_store():
        disk = DiskTier(tmp_path / "passages", KVCodec(), max_bytes=1024**2)
        return PassageStore([MemoryTier(), disk, RedisTier(redis_server.url, KVCodec(), timeout_seconds=60)])

    def entries_of(store):
        return [tier["entries"] for tier in store.stats()["tiers"]]

    with closing(open_store()) as store:
        store.put_many({"one": entry(1), "two": entry(2)}, {"one": ["doc"], "two": ["other"]})
        assert store.flush(SECONDS)
        assert entries_of(store) == [2, 2, 2]
    with closing(open_store()) as store:
        assert entries_of(store) == [0, 2, 2]
        assert set(store.get_many({"one": SHAPE, "two": SHAPE})) == {"one", "two"}
        assert entries_of(store) == [2, 2, 2]
        assert store.drop(["doc"]) == 1
        assert entries_of(store) == [1, 1, 1]
        assert store.clear() == 1
        assert entries_of(store) == [0, 0, 0]


def test_the_store_goes_on_while_redis_is_away(caplog):
    with RedisServer() as server:
        tier = RedisTier(server.url, KVCodec(), timeout_seconds=0.2)
        with closing(PassageStore([MemoryTier(), tier])) as store:
            server.kill()
            for number in range(5):
                store.put_many({f"key{number}": entry(number)}, {f"key{number}": ["doc"]})
            assert store.flush(SECONDS)
            assert len(store.get_many({f"key{number}": SHAPE for number in range(6)})) == 5
            assert store.drop(["doc"]) == 5
            assert store.stats()["tiers"][1]["errors"] >= 1
