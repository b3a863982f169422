import dataclasses
import math
import os
import threading
from contextlib import closing

import pytest

from rag_posfix.caching.answers.tiered import Blob
from rag_posfix.caching.tier import AdaptiveDeadline, CircuitBreaker, Counters, DeadlineRunner, Guard, MemoryTier
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


def fail(error):
    def operation():
        raise error

    return operation


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(5, 30, clock)


def test_one_failure_opens_it_for_the_cooldown(breaker, clock):
    breaker.failure()
    assert not breaker.closed
    clock.advance(4.9)
    assert not breaker.allow()
    clock.advance(0.2)
    assert breaker.allow()


def test_half_open_lets_one_caller_try(breaker, clock):
    breaker.failure()
    clock.advance(5)
    assert [breaker.allow() for _ in range(3)] == [True, False, False]


def test_success_closes_it_and_forgets_the_long_cooldown(breaker, clock):
    for _ in range(4):
        breaker.failure()
        clock.advance(31)
        assert breaker.allow()
    breaker.success()
    assert breaker.closed
    breaker.failure()
    clock.advance(5)
    assert breaker.allow()


def test_the_cooldown_doubles_up_to_its_limit(breaker, clock):
    cooldowns = []
    breaker.failure()
    for _ in range(5):
        cooldown = 0
        while not breaker.allow():
            clock.advance(1)
            cooldown += 1
        cooldowns.append(cooldown)
        breaker.failure()
    assert cooldowns == [5, 10, 20, 30, 30]


def test_many_failures_of_one_outage_count_once(breaker, clock):
    for _ in range(10):
        breaker.failure()
    clock.advance(5)
    assert breaker.allow()


def test_a_caller_that_never_reports_does_not_keep_it_open_for_ever(breaker, clock):
    breaker.failure()
    clock.advance(5)
    assert breaker.allow()
    clock.advance(5)
    assert breaker.allow()


@pytest.mark.parametrize("cooldown", [0, -1, 31])
def test_a_cooldown_out_of_bounds_is_rejected(cooldown):
    with pytest.raises(CacheError, match=r"cooldown_seconds=.* must be above 0"):
        CircuitBreaker(cooldown, 30)


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def guard(counters, breaker):
    return Guard("test cache", counters, breaker, (OSError,), lambda error: isinstance(error, PermissionError))


def read(guard, operation, **options):
    return guard.call("reading the store", operation, None, **options)


def test_a_failure_is_none_counted_and_opens_the_breaker(guard, counters, breaker):
    assert read(guard, fail(OSError())) is None
    assert counters["errors"] == 1
    assert not breaker.closed
    assert read(guard, lambda: 42) is None, "the store must not be asked"


def test_the_breaker_can_be_ignored_and_is_closed_by_a_success(guard, counters, breaker):
    read(guard, fail(OSError()))
    assert read(guard, lambda: 42, ignore_breaker=True) == 42
    assert breaker.closed


def test_a_rejection_is_counted_and_leaves_the_breaker_closed(guard, counters, breaker):
    assert read(guard, fail(PermissionError())) is None
    assert counters["errors"] == 1
    assert read(guard, lambda: 42) == 42


def test_a_failure_of_another_kind_is_raised(guard, counters, breaker):
    with pytest.raises(ZeroDivisionError):
        read(guard, fail(ZeroDivisionError()))
    assert counters["errors"] == 0


def test_an_outage_is_two_lines_in_the_log_without_what_the_error_says(guard, clock, caplog):
    for _ in range(3):
        read(guard, fail(OSError("secret")))
        clock.advance(31)
    read(guard, lambda: 42)
    assert [record.message for record in caplog.records] == [
        "test cache: reading the store is failing (OSError); answering without it",
        "test cache: reading the store works again",
    ]


def test_reading_and_writing_share_the_breaker_and_not_their_lines_in_the_log(guard, caplog):
    for _ in range(3):
        assert guard.call("writing the store", fail(PermissionError()), None) is None
        assert read(guard, lambda: 42) == 42
    assert len(caplog.records) == 1
    guard.call("writing the store", fail(OSError()), None)
    assert read(guard, lambda: 42) is None


def test_skipped_reads_are_counted_and_skipped_writes_are_no_lookups(guard, counters):
    read(guard, fail(OSError()))
    read(guard, lambda: 42)
    assert guard.call("writing the store", lambda: 42, "default") == "default"
    assert counters["skipped"] == 1


def test_a_guard_without_a_breaker_always_calls():
    guard = Guard("test cache")
    assert guard.call("the tier", fail(ZeroDivisionError()), "default") == "default"
    assert guard.call("the tier", lambda: 42, "default") == 42


@pytest.fixture
def runner():
    with closing(DeadlineRunner("test", max_threads=2)) as runner:
        yield runner


@pytest.mark.parametrize("seconds", [1e10, math.inf])
def test_a_time_that_no_lock_can_wait_is_no_limit(runner, seconds):
    assert runner.run(lambda: 42, seconds) == 42


def test_it_raises_what_the_operation_raises(runner):
    with pytest.raises(ZeroDivisionError):
        runner.run(lambda: 1 / 0, 60)
    assert runner.run(lambda: 42, 60) == 42


def leave_hanging(runner: DeadlineRunner, over: threading.Event) -> None:
    """Leave an operation behind that hangs until ``over``: what did not begin in time is run again."""
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        over.wait()

    while not begun.is_set():
        with pytest.raises(TimeoutError):
            runner.run(hang, 0.01)


def test_it_leaves_a_hanging_operation_behind(runner):
    over = threading.Event()
    leave_hanging(runner, over)
    assert runner.running == 1
    assert runner.run(lambda: 42, 60) == 42
    over.set()


def test_an_operation_that_did_not_begin_in_time_never_does(runner):
    over, ran = threading.Event(), []
    for _ in range(2):
        leave_hanging(runner, over)
    with pytest.raises(TimeoutError):
        runner.run(lambda: ran.append(1), 0.01)
    over.set()
    assert runner.run(lambda: 42, 60) == 42
    assert not ran


def test_threads_are_bounded_and_reused(runner):
    names = {runner.run(lambda: threading.current_thread().name, 60) for _ in range(20)}
    assert names <= {"test-0", "test-1"}


def test_many_callers_get_their_own_results(runner):
    results = in_threads(lambda number: runner.run(lambda: number * 2, 60), range(50))
    assert results == [number * 2 for number in range(50)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_it_works_after_a_fork(runner):
    runner.run(lambda: 42, 60)
    child = os.fork()
    if not child:
        os._exit(0 if runner.run(lambda: 42, 60) == 42 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_closed_it_refuses(runner):
    runner.run(lambda: 42, 60)
    runner.close()
    with pytest.raises(RuntimeError, match="test is closed"):
        runner.run(lambda: 42, 60)


def test_an_adaptive_deadline_starts_at_the_shortest_and_stays_there_for_a_fast_store():
    deadline = AdaptiveDeadline(0.02, 0.2)
    assert deadline.seconds == 0.02
    for _ in range(100):
        deadline.record(0.001)
    assert deadline.seconds == 0.02


def test_an_adaptive_deadline_follows_the_formula():
    deadline = AdaptiveDeadline(0.0, 100.0)
    deadline.record(1.0)
    assert deadline.seconds == pytest.approx(3.0)  # 1 + 4 x 1/2
    deadline.record(2.0)
    # deviation 0.5 + (1 - 0.5) / 4 = 0.625, latency 1 + 1/8
    assert deadline.seconds == pytest.approx(1.125 + 4 * 0.625)


def test_an_adaptive_deadline_leaves_a_constant_latency_room():
    deadline = AdaptiveDeadline(0.02, 1.0)
    for _ in range(100):
        deadline.record(0.1)
    assert deadline.seconds == pytest.approx(0.2)  # the deviation is about 0


def test_an_adaptive_deadline_has_an_upper_bound_and_comes_down_again():
    deadline = AdaptiveDeadline(0.02, 0.2)
    for _ in range(20):
        deadline.record(5.0)
    assert deadline.seconds == 0.2
    for _ in range(200):
        deadline.record(0.001)
    assert deadline.seconds == 0.02
