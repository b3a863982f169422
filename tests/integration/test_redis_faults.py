"""Whatever happens to Redis, a request is answered as if it were not there, and waits for Redis once.

How long that is, the benchmark measures: ``python -m benchmarks.faults``.
"""

import threading
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
import redis

from benchmarks.faults.scenarios import one_name
from rag_posfix.caching.answers.tiered import BlobCodec, TieredAnswerCache
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import CircuitBreaker
from rag_posfix.settings import CacheSettings
from tests.support import faulty_server as faulty
from tests.support.clock import Clock
from tests.support.passages import get_blob, set_blob
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

REPLIES = {
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "binary": bytes(range(128, 256)) * 4,
    "nothing but a newline": b"\r\n",
    "a number": b":1\r\n",
    "ok": b"+OK\r\n",
    "a foreign value": b"$5\r\nhello\r\n",
    "an error": b"-ERR something\r\n",
    "a huge length": b"$999999999999\r\n",
    "nested": b"*1\r\n" * 2000,
}


def open_cache(url, breaker=None):
    """The Redis tier alone, with the default time limit."""
    timeout = CacheSettings.model_fields["redis_timeout_seconds"].default
    return RedisTier(url, BlobCodec(), timeout_seconds=timeout, breaker=breaker)


def open_resting_cache(url):
    """A cache that is not tried again once it failed: the time of its breaker stands still."""
    return open_cache(url, CircuitBreaker(clock=Clock()))


def assert_a_pair_misses(cache, answers=None):
    answers = answers or TieredAnswerCache([cache])
    found = answers.get("key")
    answers.put("key", {"text": "answer"}, ["document"])
    assert found is None


def assert_redis_is_waited_for_once(url):
    with closing(open_resting_cache(url)) as cache:
        assert_a_pair_misses(cache)
        stats = cache.stats()
        assert (stats.errors, stats.hits, stats.misses, stats.available) == (1, 0, 0, False)
        assert_a_pair_misses(cache)
        assert cache.stats().errors == 1


def assert_pairs_miss(url):
    """Redis answers, perhaps in time: each look-up may be an error of its own."""
    with closing(open_resting_cache(url)) as cache:
        for _ in range(2):
            assert_a_pair_misses(cache)
        assert cache.stats().hits == 0


def test_stopped():
    with RedisServer() as server:
        server.stop()
        assert_redis_is_waited_for_once(server.url)


def test_a_name_that_does_not_resolve(monkeypatch):
    hanging = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_args, **_kwargs: hanging.wait(60) and [])
    try:
        assert_redis_is_waited_for_once("redis://redis.invalid:6379")
    finally:
        hanging.set()


def test_black_holed_while_connecting():
    with faulty.full_backlog() as url:
        assert_redis_is_waited_for_once(url)


@pytest.mark.parametrize(
    "serve",
    [
        faulty.never_answers,
        faulty.sends_one_byte_at_a_time,
        faulty.dies_in_the_middle_of_the_reply,
        *(pytest.param(faulty.answers_to_each_request(reply), id=name) for name, reply in REPLIES.items()),
    ],
)
def test_a_server_that_does_not_speak_redis(serve):
    with faulty.faulty_server(serve) as url:
        assert_pairs_miss(url)


def test_wrong_password():
    with RedisServer(password="right") as server:
        assert_pairs_miss(server.url.replace("right", "wrong"))
        assert_pairs_miss(server.url.replace(":right@", ""))


def test_paused_while_connected():
    with RedisServer() as server, warm(server) as cache:
        server.pause()
        errors = cache.stats().errors
        assert_a_pair_misses(cache)
        assert (cache.stats().errors, cache.stats().available) == (errors + 1, False)


def test_killed_in_the_middle_of_a_request():
    with RedisServer() as server, warm(server, timeout_seconds=60) as cache:
        server.pause()  # so that the request is certainly under way
        killer = threading.Timer(0.01, server.kill)
        killer.start()
        assert_a_pair_misses(cache)
        killer.join()
        assert not cache.stats().available


def test_full_redis_refuses_writes_and_serves_reads(caplog):
    with RedisServer(maxmemory="1", **{"maxmemory-policy": "noeviction"}) as server:
        with warm(server, timeout_seconds=60) as cache:
            errors = cache.stats().errors
            caplog.clear()
            for _ in range(5):
                assert_a_pair_misses(cache)
            assert cache.stats().available
            assert cache.stats().errors == errors + 5
        assert not caplog.records


def test_loses_its_connections_and_goes_on():
    with RedisServer() as server, warm(server, timeout_seconds=60) as cache:
        set_blob(cache, "other", b"answer", 60)
        server.command("CLIENT", "KILL", "TYPE", "normal")
        assert get_blob(cache, "other") == b"answer"


def test_recovers_by_itself_after_a_restart(caplog):
    clock = Clock()
    with RedisServer() as server, closing(open_cache(server.url, CircuitBreaker(clock=clock))) as cache:
        warm_up(cache, clock)
        server.kill()
        assert_a_pair_misses(cache)
        server.start()
        misses, skipped = cache.stats().misses, cache.stats().skipped
        set_blob(cache, "key", b"answer", 60)
        assert get_blob(cache, "key") is None, "the breaker must still give it a rest"
        assert (cache.stats().misses, cache.stats().skipped) == (misses, skipped + 1), "a rest is told from a miss"
        assert get_blob(warm_up(cache, clock), "warm") == b"up"
        assert cache.stats().available
    assert "works again" in caplog.text


def test_recovers_from_a_server_that_drips():
    clock, connections = Clock(), []

    def serve(connection, over):
        connections.append(connection)
        faulty.sends_one_byte_at_a_time(connection, over)

    with faulty.faulty_server(serve) as url, closing(open_cache(url, CircuitBreaker(clock=clock))) as cache:

        def has_asked(times):
            get_blob(cache, "key")
            clock.advance(31)
            return len(connections) >= times

        for times in range(1, 9):  # more often than it has threads: attempts must reach the server
            wait_until(lambda times=times: has_asked(times))


def test_dropping_entries_says_so_when_it_fails(caplog):
    with RedisServer() as server:
        server.kill()
        with closing(open_cache(server.url)) as cache:
            assert cache.delete_tags(["tag"]) == 0
            assert cache.clear() == 0
    assert caplog.text.count("could not drop entries") == 2


@pytest.mark.parametrize(("latency", "is_used", "deadline"), [(0.0625, True, 0.1875), (0.1875, False, 0.2)])
def test_a_redis_that_is_late_is_used_if_it_answers_within_three_quarters_of_the_longest_wait(
    latency, is_used, deadline, monkeypatch
):
    """Its deadline is 20 ms and 200 ms at most. After one latency it is that + 4 x its half (RFC 6298)."""
    clock, is_missed = Clock(), threading.Event()
    monkeypatch.setattr("rag_posfix.caching.redis_client.time", SimpleNamespace(monotonic=clock))

    def serve(connection, over):
        connection.settimeout(60)
        while not over.is_set() and connection.recv(65536):
            is_missed.wait(60)
            connection.sendall(b"$-1\r\n")

    with faulty.faulty_server(serve) as url, closing(open_resting_cache(url)) as cache:
        assert get_blob(cache, "key") is None
        assert (cache.stats().errors, cache.stats().available) == (1, False)
        clock.advance(latency)
        is_missed.set()
        wait_until(lambda: cache.wait_seconds == pytest.approx(deadline))
        wait_until(lambda: cache.stats().available == is_used)


def test_a_redis_that_was_not_asked_in_time_does_not_count_as_one_that_answered(monkeypatch):
    clock, is_missed, connect = Clock(), threading.Event(), redis.Connection.connect

    def connect_late(connection):
        is_missed.wait(60)
        connect(connection)

    monkeypatch.setattr(redis.Connection, "connect", connect_late)
    monkeypatch.setattr("rag_posfix.caching.redis_client.time", SimpleNamespace(monotonic=clock))
    before = threading.enumerate()
    with closing(open_resting_cache("redis://127.0.0.1:1")) as cache:
        assert get_blob(cache, "key") is None
        threads = [thread for thread in threading.enumerate() if thread not in before]
        clock.advance(0.0625)  # an answer would come in time to be used
        is_missed.set()
    wait_until(lambda: not any(thread.is_alive() for thread in threads))
    assert (len(threads), cache.stats().available) == (1, False)


@contextmanager
def slow_cache(seconds):
    """A cache with the default time limit, whose Redis wants a password and answers ``seconds`` late."""
    with RedisServer(password="right") as server:
        with closing(open_cache(server.url)) as direct:
            wait_until(lambda: set_blob(direct, "key", b"answer", 60) or get_blob(direct, "key") == b"answer")
        relay = faulty.DelayingRelay(server.port, seconds)
        with faulty.faulty_server(relay) as url, closing(open_cache(url.replace("//", "//:right@"))) as cache:
            yield cache, relay


def test_a_slow_healthy_redis_is_used():
    with slow_cache(0.04) as (cache, _):  # twice the time limit
        wait_until(lambda: get_blob(cache, "key") == b"answer")
        answers, other = TieredAnswerCache([cache]), {"text": "answer"}
        # Its tags take further round trips.
        wait_until(lambda: answers.put("other", other, ["document"]) or answers.get("other") == other)


def test_a_redis_beyond_the_bound_is_not_used_and_keeps_its_connections():
    with slow_cache(0.17) as (cache, relay):

        def has_probed():
            assert get_blob(cache, "key") is None
            return relay.requests.count(b"probe") >= 6

        wait_until(has_probed)  # three times: each probe asks twice
        assert relay.connections <= 8, "four stay open for all of them"
        relay.seconds = 0.0
        wait_until(lambda: get_blob(cache, "key") == b"answer")


@contextmanager
def warm(server, timeout_seconds=0.02):
    clock = Clock()
    with closing(
        RedisTier(server.url, BlobCodec(), timeout_seconds=timeout_seconds, breaker=CircuitBreaker(clock=clock))
    ) as cache:
        yield warm_up(cache, clock)


def warm_up(cache, clock):
    """Return ``cache`` once it is connected and its breaker closed, however busy the machine is."""

    def is_warm():
        clock.advance(31)
        get_blob(cache, "warm")
        set_blob(cache, "warm", b"up", 60)
        get_blob(cache, "warm")
        return cache.stats().available

    wait_until(is_warm)
    return cache


def test_behind_one_name_a_failover_costs_one_write_and_a_deletion_reaches_the_new_master():
    with one_name() as (url, swap), closing(RedisTier(url, BlobCodec(), timeout_seconds=60)) as tier:
        cache = TieredAnswerCache([tier])
        cache.put("before", {"text": "answer"}, ["document"])
        swap()
        cache.put("lost", {"text": "answer"}, ["document"])  # the former master rejects it, on an open connection
        cache.put("first", {"text": "answer"}, ["document"])
        with closing(RedisTier(url, BlobCodec(), timeout_seconds=60)) as other:
            assert TieredAnswerCache([other]).get("lost") is None
            assert TieredAnswerCache([other]).get("first") == {"text": "answer"}
            cache.drop_documents(["document"])
            wait_until(lambda: cache.pending_deletions == 0, 30)
            assert [TieredAnswerCache([other]).get(key) for key in ("before", "first")] == [None, None]
