import pytest

from rag_posfix.caching.breaker import CircuitBreaker
from rag_posfix.caching.store_access import StoreAccess, StoreFailures
from rag_posfix.caching.tier import Counters
from tests.support.clock import Clock


def fail(error):
    def operation():
        raise error

    return operation


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def failures(clock):
    return StoreFailures(
        "test cache",
        Counters(),
        CircuitBreaker(5, 30, clock),
        exceptions=(OSError,),
        is_refusal=lambda error: isinstance(error, PermissionError),
    )


@pytest.fixture
def access(failures):
    return StoreAccess("reading the store", failures)


def test_it_returns_what_the_operation_returns(access):
    assert access.call(lambda: 42) == 42


def test_a_failure_is_none_counted_and_opens_the_breaker(access, failures):
    assert access.call(fail(OSError())) is None
    assert failures.counters["errors"] == 1
    assert not failures.breaker.closed
    assert access.call(lambda: 42) is None, "the store must not be asked"


def test_the_breaker_can_be_ignored_and_is_closed_by_a_success(access, failures):
    access.call(fail(OSError()))
    assert access.call(lambda: 42, ignore_breaker=True) == 42
    assert failures.breaker.closed


def test_a_refusal_is_counted_and_leaves_the_breaker_closed(access, failures):
    assert access.call(fail(PermissionError())) is None
    assert failures.counters["errors"] == 1
    assert access.call(lambda: 42) == 42


def test_a_failure_of_another_kind_is_raised(access, failures):
    with pytest.raises(ZeroDivisionError):
        access.call(fail(ZeroDivisionError()))
    assert failures.counters["errors"] == 0


def test_an_outage_is_two_lines_in_the_log_without_what_the_error_says(access, clock, caplog):
    for _ in range(3):
        access.call(fail(OSError("secret")))
        clock.advance(31)
    access.call(lambda: 42)
    assert [record.message for record in caplog.records] == [
        "test cache: reading the store is failing (OSError); answering without it",
        "test cache: reading the store works again",
    ]


def test_reading_and_writing_share_the_breaker_and_not_their_lines_in_the_log(access, failures, caplog):
    writes = StoreAccess("writing the store", failures)
    for _ in range(3):
        assert writes.call(fail(PermissionError())) is None
        assert access.call(lambda: 42) == 42
    assert len(caplog.records) == 1
    writes.call(fail(OSError()))
    assert access.call(lambda: 42) is None
