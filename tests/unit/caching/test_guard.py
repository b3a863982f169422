import pytest

from rag_posfix.caching.tier import CircuitBreaker, Counters, Guard
from rag_posfix.errors import CacheError
from tests.support.clock import Clock


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
