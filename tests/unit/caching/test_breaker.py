import pytest

from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.errors import CacheError
from tests.support.clock import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return CircuitBreaker(5, 30, clock)


def test_it_begins_closed(breaker):
    assert breaker.closed
    assert all(breaker.allow() for _ in range(3))


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


def test_success_closes_it_and_forgets_the_long_rest(breaker, clock):
    for _ in range(4):
        breaker.failure()
        clock.advance(31)
        assert breaker.allow()
    breaker.success()
    assert breaker.closed
    breaker.failure()
    clock.advance(5)
    assert breaker.allow()


def test_the_rest_doubles_up_to_its_bound(breaker, clock):
    rests = []
    breaker.failure()
    for _ in range(5):
        rest = 0
        while not breaker.allow():
            clock.advance(1)
            rest += 1
        rests.append(rest)
        breaker.failure()
    assert rests == [5, 10, 20, 30, 30]


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
def test_a_rest_out_of_bounds_is_refused(cooldown):
    with pytest.raises(CacheError, match=r"cooldown_seconds=.* must be above 0"):
        CircuitBreaker(cooldown, 30)
