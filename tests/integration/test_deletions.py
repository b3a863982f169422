"""Copies of deleted documents are erased everywhere: evicted tags, a killed master, several processes."""

from contextlib import ExitStack, closing

import pytest
import torch

from benchmarks.faults.deletions import Process, after_eviction, after_failover
from rag_posfix.caching.answers.tiered import BlobCodec, TieredAnswerCache
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv.store import KVCodec, PassageStore
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import MemoryTier
from tests.support.passages import SHAPE, entry
from tests.support.waiting import wait_until

ANSWER = {"text": "Paris"}
DELETED = "rag_posfix:answer-deleted"


@pytest.fixture
def open_cache(redis_server):
    with ExitStack() as stack:

        def open_cache(*local, ttl_seconds=3600.0, timeout_seconds=60):
            tier = RedisTier(redis_server.url, BlobCodec(), timeout_seconds=timeout_seconds, ttl_seconds=ttl_seconds)
            cache = TieredAnswerCache([*(local or [MemoryTier()]), tier], ttl_seconds=ttl_seconds)
            stack.callback(cache.close)
            return cache

        yield open_cache


def confirm(cache):
    assert cache.flush_deletions(60)


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
def test_copies_in_the_memory_of_another_process_are_erased(redis_server, open_cache):
    cache = open_cache()
    with Process(redis_server.url) as other:
        other.call("put", 20)
        wait_until(lambda: other.call("get", 20) == 20)
        cache.drop_documents([f"document-{number}" for number in range(10)])
        assert cache.pending_deletions == 10, "the other process may not have read of them yet"
        confirm(cache)
        wait_until(lambda: other.call("get", 20) == 10)


def test_an_answer_that_was_being_computed_during_the_deletion_is_not_stored(open_cache):
    cache = open_cache()
    with cache.begin():
        assert cache.get("key") is None
        cache.drop_documents(["doc"])
        cache.put("key", ANSWER, ["doc"])
        assert cache.get("key") is None
    cache.put("key", ANSWER, ["doc"])
    assert cache.get("key") == ANSWER, "the document may have been added again"


@pytest.mark.slow
def test_a_deletion_while_redis_hangs_is_pending_and_erases_its_copies_when_redis_goes_on(redis_server, open_cache):
    first, second = open_cache(timeout_seconds=2), open_cache(timeout_seconds=2)
    stored(first)
    assert second.get("key") == ANSWER
    redis_server.pause()
    try:
        assert first.drop_documents(["doc"]) == 1
        assert first.pending_deletions == 1
        assert first.get("key") is None
    finally:
        redis_server.resume()
    confirm(first)
    wait_until(lambda: second.get("key") is None)
    assert redis_server.command("EXISTS", "rag_posfix:answer:key") == b":0\r\n"


@pytest.mark.slow
def test_a_redis_that_lost_everything_is_told_the_deletions_again(redis_server, open_cache):
    first, second = open_cache(), open_cache()
    first.drop_documents(["doc"])
    second.drop_documents(["gone"])
    confirm(first)
    confirm(second)
    redis_server.command("FLUSHALL")
    wait_until(lambda: redis_server.command("ZCARD", DELETED) == b":2\r\n")
    confirm(first)
    confirm(second)


def test_the_set_holds_deletions_for_the_lifetime_of_entries_and_is_never_evicted(redis_server, open_cache):
    cache = open_cache(ttl_seconds=1.0)
    cache.drop_documents(["doc", "second"])
    until = redis_seconds(redis_server) + 1.1
    assert redis_server.command("TTL", DELETED) == b":-1\r\n"
    wait_until(lambda: redis_seconds(redis_server) > until)
    cache.drop_documents(["third"])
    assert redis_server.command("ZCARD", DELETED) == b":1\r\n"


def redis_seconds(server):
    """The time of Redis, which is that of the deletions."""
    _, _, seconds, _, microseconds, _ = server.command("TIME").split(b"\r\n")
    return int(seconds) + int(microseconds) / 1e6


@pytest.mark.slow
def test_clear_reaches_the_memory_of_other_processes(redis_server, open_cache):
    cache = open_cache()
    with Process(redis_server.url) as other:
        other.call("put", 5)
        cache.clear()
        wait_until(lambda: other.call("get", 5) == 0)
        confirm(cache)
        other.call("put", 5)
        wait_until(lambda: other.call("get", 5) == 5)


def test_keys_and_values_in_the_memory_of_another_process_are_erased(redis_server):
    def open_store():
        return PassageStore([MemoryTier(), RedisTier(redis_server.url, KVCodec(), timeout_seconds=60)])

    with closing(open_store()) as first, closing(open_store()) as second:
        first.put_many({"key": entry(1), "kept": entry(2)}, {"key": ["doc"], "kept": ["other"]})
        assert first.flush()
        assert len(second.get_many(dict.fromkeys(("key", "kept"), SHAPE))) == 2
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


def test_a_deletion_of_many_documents_is_small_in_redis(redis_server, open_cache):
    cache = open_cache()
    cache.drop_documents([f"document-{number}" for number in range(5000)])
    size = int(redis_server.command("MEMORY", "USAGE", DELETED)[1:])
    assert size < 200 * 5000  # also while Redis moves the set to a larger table
