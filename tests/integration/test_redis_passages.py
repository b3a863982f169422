"""The passage KV store on a real redis-server."""

import dataclasses
import re
from contextlib import closing

import pytest
import redis
import torch

from rag_posfix.caching.answers.tiered import BlobCodec
from rag_posfix.caching.kv.store import KVCodec, PassageKV, serialize
from rag_posfix.caching.redis import RedisTier
from rag_posfix.errors import CacheError
from tests.support.clock import Clock
from tests.support.passages import SHAPE, entry, get, get_blob, open_tier, same, set_blob
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

LARGE = dataclasses.replace(SHAPE, n_tokens=128)  # 4 KiB
HUGE = dataclasses.replace(SHAPE, layers=30, heads=3, head_dim=64, n_tokens=150)  # 3.3 MiB: two per round trip
KIB = 1024


@pytest.fixture
def tier(redis_server):
    with open_tier(redis_server) as tier:
        yield tier


def names(server):
    return [word for word in server.command("KEYS", "*").decode().split("\r\n") if word.startswith("rag_posfix")]


def updates_of_the_index(server):
    """Return how many ZADD commands there were since CONFIG RESETSTAT: one per round trip with entries."""
    (calls,) = re.findall(rb"cmdstat_zadd:calls=(\d+)", server.command("INFO", "commandstats"))
    return int(calls)


def set_bytes(server, name, value):

    client = redis.Redis(port=server.port)
    client.set(name, value)
    client.close()


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_entry_comes_back_bit_by_bit_with_its_tags(redis_server, dtype, compress):
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    with open_tier(redis_server, compress=compress) as tier:
        tier.put_many({"key": entry(1, shape, tags=("a", "b"))})
        assert same(get(tier, "key", shape), entry(1, shape, tags=("a", "b")))


def test_compressed_and_plain_entries_can_be_mixed(redis_server):
    zeros = PassageKV(torch.zeros(LARGE.sizes, dtype=LARGE.dtype))
    with open_tier(redis_server, compress=True) as one, open_tier(redis_server) as two:
        one.put_many({"one": zeros})
        two.put_many({"two": zeros})
        for tier in (one, two):
            found = tier.get_many(dict.fromkeys(("one", "two"), LARGE))
            assert same(found["one"], zeros)
            assert same(found["two"], zeros)
    assert int(redis_server.command("STRLEN", "rag_posfix:passage:one")[1:]) < 1000
    assert int(redis_server.command("STRLEN", "rag_posfix:passage:two")[1:]) > 4000


def test_entries_of_megabytes_are_sent_and_fetched_two_at_a_time(tier, redis_server):
    entries = {f"key{number}": entry(number, HUGE) for number in range(5)}
    redis_server.command("CONFIG", "RESETSTAT")
    tier.put_many(entries)
    assert updates_of_the_index(redis_server) == 3
    found = tier.get_many(dict.fromkeys(entries, HUGE))
    assert list(found) == list(entries)
    assert all(same(found[key], entries[key]) for key in entries)
    assert updates_of_the_index(redis_server) == 3 + 3


def test_keys_have_the_documented_names_and_a_time_to_live(redis_server):
    with open_tier(redis_server, ttl_seconds=10_000) as tier:
        tier.put_many({"key": entry(tags=("tag",))})
    assert sorted(names(redis_server)) == [
        "rag_posfix:passage-index",
        "rag_posfix:passage-tag:tag",
        "rag_posfix:passage:key",
    ]
    for name in names(redis_server):
        assert 9_000 < int(redis_server.command("TTL", name)[1:]) <= 10_061


def damages():
    data = serialize("key", entry())
    return {
        "a flipped byte": data[:-7] + bytes([data[-7] ^ 1]) + data[-6:],
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "garbage": b"nonsense" * 100,
        "compressed garbage": b"RPKZ" + b"\xff" * 100,
        "an answer": b"RPX1" + b"x" * 400,
        "of another key": serialize("other", entry()),
        "of another model": serialize("key", entry(0, dataclasses.replace(SHAPE, heads=2))),
        "of another type": serialize("key", entry(0, dataclasses.replace(SHAPE, dtype=torch.float16))),
    }


@pytest.mark.parametrize("damage", damages().values(), ids=damages().keys())
def test_a_damaged_or_foreign_entry_is_a_miss_and_counted(tier, redis_server, damage):
    tier.put_many({"key": entry(), "other": entry(2)})
    set_bytes(redis_server, "rag_posfix:passage:key", damage)
    assert list(tier.get_many({"key": SHAPE, "other": SHAPE})) == ["other"]
    stats = tier.stats()
    assert (stats.corrupt, stats.misses, stats.hits, stats.errors) == (1, 1, 1, 0)
    tier.put_many({"key": entry(3)})
    assert same(get(tier, "key"), entry(3))


def test_a_key_of_another_type_is_a_miss_and_does_not_stop_the_tier(tier, redis_server):
    redis_server.command("LPUSH", "rag_posfix:passage:key", "foreign")
    tier.put_many({"other": entry()})
    assert list(tier.get_many({"key": SHAPE, "other": SHAPE})) == ["other"]
    assert (tier.stats().corrupt, tier.stats().errors, tier.stats().available) == (1, 0, True)


def test_clear_leaves_the_answer_cache_and_the_keys_of_others(tier, redis_server):
    with closing(RedisTier(redis_server.url, BlobCodec(), timeout_seconds=60)) as answers:
        set_blob(answers, "key", b"answer", 60, ["tag"])
        redis_server.command("SET", "somebody:else", "1")
        tier.put_many({f"key{number}": entry(number, tags=("tag",)) for number in range(7)})
        assert answers.clear() == 1
        assert tier.stats().entries == 7
        set_blob(answers, "key", b"answer", 60, ["tag"])
        assert tier.clear() == 7
        assert get_blob(answers, "key") == b"answer"
        assert redis_server.command("GET", "somebody:else") == b"$1\r\n1\r\n"
        assert sorted(names(redis_server)) == ["rag_posfix:answer:key", "rag_posfix:tag:tag"]


def test_bytes_are_bounded_and_the_least_recently_used_entries_go_first(redis_server):
    clock = Clock()
    with open_tier(redis_server, max_bytes=64 * KIB, clock=clock) as tier:
        tier.put_many({"favourite": entry(99)})
        for number in range(60):
            clock.advance(1)
            tier.put_many({f"key{number}": entry(number, LARGE)})
            assert tier.stats().bytes <= 64 * KIB * (1 + 1 / 32)
            assert get(tier, "favourite") is not None
        assert tier.stats().evictions > 40
        held = [number for number in range(60) if get(tier, f"key{number}", LARGE) is not None]
        assert held == list(range(held[0], 60))
        assert int(redis_server.command("ZCARD", "rag_posfix:passage-index")[1:]) == len(held) + 1


def test_the_bound_counts_what_other_processes_wrote(redis_server):
    with open_tier(redis_server) as other:
        other.put_many({f"other{number}": entry(number, LARGE) for number in range(30)})
    with open_tier(redis_server, max_bytes=64 * KIB) as tier:
        tier.put_many({"key": entry()})
        assert tier.stats().bytes <= 64 * KIB
        assert get(tier, "key") is not None


def test_the_bound_forgets_what_redis_dropped_by_itself(redis_server):
    clock = Clock()
    with open_tier(redis_server, max_bytes=64 * KIB, clock=clock) as tier:
        tier.put_many({f"key{number}": entry(number, LARGE) for number in range(14)})
        for number in range(14):
            redis_server.command("DEL", f"rag_posfix:passage:key{number}")
        assert (tier.stats().entries, tier.stats().bytes) == (0, 0)
        clock.advance(100)
        tier.put_many({f"new{number}": entry(number, LARGE) for number in range(14)})
        assert tier.stats().entries == 14
        assert tier.stats().evictions == 0
        assert redis_server.command("ZCARD", "rag_posfix:passage-index") == b":14\r\n"


def test_an_entry_of_more_than_a_quarter_of_the_bound_is_not_sent(redis_server):
    with open_tier(redis_server, max_bytes=64 * KIB) as tier:
        tier.put_many({"key": entry(0, dataclasses.replace(SHAPE, n_tokens=600)), "small": entry()})
        assert tier.stats().entries == 1
        assert get(tier, "small") is not None


def test_a_cluster_is_one_more_redis():
    with RedisServer(**{"cluster-enabled": "yes"}) as server:
        server.command("CLUSTER", "ADDSLOTS", *(str(slot) for slot in range(16384)))
        wait_until(lambda: b"cluster_state:ok" in server.command("CLUSTER", "INFO"))
        url = f"redis-cluster://127.0.0.1:{server.port}"
        with closing(RedisTier(url, KVCodec(), timeout_seconds=60, max_bytes=64 * KIB)) as tier:
            entries = {f"key{number}": entry(number, LARGE, tags=("a",)) for number in range(30)}
            tier.put_many(entries)
            found = tier.get_many(dict.fromkeys(entries, LARGE))
            assert 10 < len(found) < 30
            assert all(same(kept, entries[key]) for key, kept in found.items())
            assert tier.stats().evictions == 30 - len(found)
            server.command("SET", f"rag_posfix:passage:{next(iter(found))}", "nonsense")
            server.command("DEL", "rag_posfix:passage:list")
            server.command("LPUSH", "rag_posfix:passage:list", "foreign")
            assert len(tier.get_many(dict.fromkeys([*found, "list"], LARGE))) == len(found) - 1
            assert tier.stats().corrupt == 2
            assert tier.delete_tags(["a"]) == len(found)
            tier.put_many({"key": entry()})
            assert tier.clear() == 2
            assert tier.stats().errors == 0


def test_a_closed_tier_only_misses(tier):
    tier.put_many({"key": entry()})
    tier.close()
    assert get(tier, "key") is None
    tier.put_many({"key": entry()})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_seconds": 0}, "timeout_seconds=0 must be above 0"),
        ({"max_bytes": 1000}, "max_bytes=1000 must be >= 65536"),
        ({"ttl_seconds": 0}, "ttl_seconds=0 must be >= 1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(options, message):
    with pytest.raises(CacheError, match=message):
        RedisTier("redis://127.0.0.1", KVCodec(), **options)
