from contextlib import suppress

import pytest

from rag_posfix.caching.answers.tiered import SingleFlight, TieredAnswerCache
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.errors import CacheError
from tests.support.threads import in_threads
from tests.support.waiting import wait_until

SECONDS = 60  # enough on a busy machine, and far below the time after which a thread stops waiting


@pytest.fixture
def flight():
    return SingleFlight(max_wait_seconds=600)


def hold(flight, key):
    """Hold ``key`` in another thread and release it; fail if it is not free within ``SECONDS``."""

    def work(_):
        with flight.hold(key):
            return True

    return in_threads(work, [None], SECONDS) == [True]


def test_equal_questions_at_the_same_time_are_computed_once():
    cache = TieredAnswerCache([MemoryTier()], max_wait_seconds=600)
    arrived, inside, most_inside, computed = [], [], [], []

    def ask(number):
        arrived.append(number)
        with cache.single_flight("key"):
            inside.append(number)
            most_inside.append(len(inside))
            wait_until(lambda: len(arrived) == 8)
            answer = cache.get("key")
            if answer is None:
                computed.append(number)
                answer = {"text": "Paris"}
                cache.put("key", answer)
            inside.remove(number)
            return answer

    assert in_threads(ask, range(8), SECONDS) == [{"text": "Paris"}] * 8
    assert len(computed) == max(most_inside) == 1


def test_different_keys_do_not_wait_for_each_other(flight):
    with flight.hold("one"):
        assert hold(flight, "two")


def test_nothing_is_kept_of_finished_keys(flight):
    def work(_):
        for index in range(50):
            with flight.hold(f"key{index % 3}"):
                pass

    in_threads(work, range(8), SECONDS)
    assert len(flight) == 0


def test_an_error_frees_the_key(flight):
    with suppress(ValueError), flight.hold("key"):
        raise ValueError
    assert hold(flight, "key")
    assert len(flight) == 0


def test_the_wait_is_bounded():
    flight = SingleFlight(max_wait_seconds=0.02)
    with flight.hold("key"):
        assert hold(flight, "key")
        assert len(flight) == 1


def test_a_negative_wait_is_refused():
    with pytest.raises(CacheError, match="max_wait_seconds=-1 must be >= 0"):
        SingleFlight(-1)
