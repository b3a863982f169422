"""Answers of deleted documents are never served again: evicted tags, a killed master, several processes."""

import time
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest
import torch

from benchmarks.faults.deletions import Process, after_eviction, after_failover
from rag_posfix.caching.answers.tiered import BlobCodec, TieredAnswerCache
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv.store import KVCodec, PassageStore
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import MemoryTier
from tests.support.clock import Clock
from tests.support.passages import SHAPE, entry
from tests.support.waiting import wait_until

ANSWER = {"text": "Paris"}
LEASE_SECONDS = 2.0


@pytest.fixture
def clock(monkeypatch):
    """The clock of the leases in this process."""
    clock = Clock()
    monkeypatch.setattr("rag_posfix.caching.deletions.time", SimpleNamespace(monotonic=clock, time_ns=time.time_ns))
    return clock


@pytest.fixture
def open_cache(redis_server, clock):
    with ExitStack() as stack:

        def open_cache(*local, lease_seconds=LEASE_SECONDS, ttl_seconds=3600.0, timeout_seconds=60):
            tier = RedisTier(redis_server.url, BlobCodec(), timeout_seconds=timeout_seconds)
            tiers = [*(local or [MemoryTier()]), tier]
            cache = TieredAnswerCache(tiers, lease_seconds=lease_seconds, ttl_seconds=ttl_seconds)
            stack.callback(cache.close)
            return cache

        yield open_cache


def confirm(cache, clock):
    """Let leases pass until every deletion of ``cache`` is confirmed."""
    wait_until(lambda: clock.advance(LEASE_SECONDS) or cache.flush_deletions(0.1))


def stored(cache, key="key", document="doc"):
    assert cache.get(key) is None
    cache.put(key, ANSWER, [document])
    assert cache.get(key) == ANSWER


@pytest.mark.slow
def test_evicted_tags_bring_no_answer_back():
    row = after_eviction(1000)  # of fewer, the buffers of three clients would evict all
    assert row["before"] == [1000] * 3
    assert row["left_in_redis"] > 0, "all was evicted, so that this shows nothing"
    assert (row["confirmed"], row["served"]) == (True, 0)


@pytest.mark.slow
def test_a_deletion_during_a_failover_is_pending_and_then_final():
    row = after_failover(100)
    assert row["before"] == [100] * 3
    assert row["pending"] == 100
    assert (row["confirmed"], row["served"]) == (True, 0)


@pytest.mark.slow
def test_copies_in_the_memory_of_another_process_are_not_served(redis_server, open_cache, clock):
    cache = open_cache()
    with Process(redis_server.url) as other:
        other.call("put", 20)
        wait_until(lambda: other.call("get", 20) == 20)
        cache.drop_documents([f"document-{number}" for number in range(10)])
        clock.advance(LEASE_SECONDS - 0.5)
        assert not cache.flush_deletions(0.1)
        assert cache.pending_deletions == 10, "the other process may not have read the log yet"
        confirm(cache, clock)
        assert cache.pending_deletions == 0
        wait_until(lambda: other.call("get", 20) == 10)


def test_an_answer_that_was_being_computed_during_the_deletion_is_not_served(open_cache):
    cache = open_cache()
    assert cache.get("key") is None
    position = cache.position
    cache.drop_documents(["doc"])
    cache.put("key", ANSWER, ["doc"], position)
    assert cache.get("key") is None
    cache.put("key", ANSWER, ["doc"])
    assert cache.get("key") == ANSWER, "the document may have been added again"


@pytest.mark.slow
def test_a_process_that_cannot_read_the_log_serves_nothing_after_the_lease(redis_server, open_cache, clock):
    strict, lenient = open_cache(timeout_seconds=2), open_cache(lease_seconds=0.0, timeout_seconds=2)
    stored(strict, "a")
    stored(lenient, "b")
    redis_server.pause()
    try:
        assert strict.get("a") == ANSWER
        clock.advance(LEASE_SECONDS)
        wait_until(lambda: strict.get("a") is None)  # a reading that was under way may have come in
        assert lenient.get("b") == ANSWER
        assert strict.drop_documents(["doc"]) == 1
        assert strict.pending_deletions == 1
        assert strict.get("a") is None
    finally:
        redis_server.resume()
    confirm(strict, clock)
    wait_until(lambda: lenient.get("b") is None)


@pytest.mark.slow
def test_a_redis_that_lost_everything_is_told_the_deletions_again(redis_server, open_cache, tmp_path, clock):
    first, second = open_cache(), open_cache(DiskTier(tmp_path, BlobCodec(), busy_seconds=60))
    stored(second)
    first.drop_documents(["doc", "gone"])
    stored(second, "other", "kept")
    redis_server.command("FLUSHALL")
    wait_until(lambda: b"rag_posfix:answer-deletions" in redis_server.command("KEYS", "*"))
    wait_until(lambda: second.get("other") is None)  # another process could have deleted it just before
    with closing(open_cache()) as third:
        third.put("old", ANSWER, ["gone"])
        confirm(first, clock)
        stored(third, "new", "kept")
    log = redis_server.command("XRANGE", "rag_posfix:answer-deletions", "-", "+").decode()
    assert len(log.split()) > 10


def test_old_deletions_are_trimmed_and_what_is_older_is_not_served(redis_server, open_cache, tmp_path):
    disk = DiskTier(tmp_path, BlobCodec(), busy_seconds=60)
    with closing(open_cache(disk)) as cache:
        stored(cache)
    cache = open_cache(ttl_seconds=0.25)
    cache.drop_documents(["doc"])
    cache.drop_documents(["second"])
    until = redis_seconds(redis_server) + 0.3
    wait_until(lambda: redis_seconds(redis_server) > until)
    cache.drop_documents(["third"])
    wait_until(lambda: redis_server.command("XLEN", "rag_posfix:answer-deletions") == b":2\r\n")
    disk = DiskTier(tmp_path, BlobCodec(), busy_seconds=60)
    assert open_cache(disk).get("key") is None, "its deletion may be one of those that were trimmed"


def redis_seconds(server):
    """The time of Redis, which numbers the log."""
    _, _, seconds, _, microseconds, _ = server.command("TIME").split(b"\r\n")
    return int(seconds) + int(microseconds) / 1e6


def test_the_log_outlives_a_full_redis_that_evicts_every_entry(redis_server, open_cache):
    cache = open_cache()
    cache.drop_documents(["doc"])
    assert redis_server.command("TTL", "rag_posfix:answer-deletions") == b":-1\r\n"


@pytest.mark.slow
def test_clear_reaches_the_memory_of_other_processes(redis_server, open_cache, clock):
    cache = open_cache()
    with Process(redis_server.url) as other:
        other.call("put", 5)
        cache.clear()
        confirm(cache, clock)
        wait_until(lambda: other.call("get", 5) == 0)
        other.call("put", 5)
        wait_until(lambda: other.call("get", 5) == 5)


def test_keys_and_values_in_the_memory_of_another_process_go_too(redis_server):
    def open_store():
        return PassageStore([MemoryTier(), RedisTier(redis_server.url, KVCodec(), timeout_seconds=60)])

    with closing(open_store()) as first, closing(open_store()) as second:
        first.put_many({"key": entry(1), "kept": entry(2)}, {"key": ["doc"], "kept": ["other"]})
        assert first.flush()
        assert len(second.get_many(dict.fromkeys(("key", "kept"), SHAPE))) == 2
        redis_server.command("DEL", "rag_posfix:passage-tag:doc")  # as if it had been evicted
        first.drop(["doc"])
        wait_until(lambda: "doc" not in second.memory_tags())
        assert list(second.get_many(dict.fromkeys(("key", "kept"), SHAPE))) == ["kept"]
        second.put_many({"key": entry(1)}, {"key": ["doc"]})
        assert torch.equal(second.get_many({"key": SHAPE})["key"].kv, entry(1).kv)


def test_a_single_process_masks_what_its_disk_could_not_delete(tmp_path):
    class Stuck(DiskTier):
        def delete_tags(self, tags):
            raise OSError("read-only")

    with closing(TieredAnswerCache([MemoryTier(), Stuck(tmp_path, BlobCodec(), busy_seconds=60)])) as cache:
        stored(cache)
        cache.drop_documents(["doc"])
        assert cache.get("key") is None


def test_a_deletion_of_many_documents_is_small_in_the_log(redis_server, open_cache, clock):
    cache = open_cache()
    cache.drop_documents([f"document-{number}" for number in range(5000)])
    confirm(cache, clock)
    size = int(redis_server.command("MEMORY", "USAGE", "rag_posfix:answer-deletions")[1:])
    assert size < 100 * 5000
