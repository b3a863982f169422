import threading
import time
from contextlib import suppress

import pytest

from rag_posfix.caching.answers.memory import MemoryCache
from rag_posfix.caching.answers.single_flight import SingleFlight
from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.errors import CacheError


def in_threads(count, target):
    barrier = threading.Barrier(count)

    def run(number):
        barrier.wait()
        target(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_equal_questions_at_the_same_time_are_computed_once():
    cache = TieredAnswerCache([MemoryCache()])
    computed, answers = [], []

    def ask(number):
        with cache.single_flight("key"):
            answer = cache.get("key")
            if answer is None:
                computed.append(number)
                time.sleep(0.02)
                answer = {"text": "Paris"}
                cache.put("key", answer)
            answers.append(answer)

    in_threads(8, ask)
    assert len(computed) == 1
    assert answers == [{"text": "Paris"}] * 8


def test_different_keys_do_not_wait_for_each_other():
    flight = SingleFlight()
    with flight.hold("one"):
        in_threads(2, lambda number: flight.hold(f"key{number}").__enter__())


def test_nothing_is_kept_of_finished_keys():
    flight = SingleFlight()

    def hold(number):
        for index in range(50):
            with flight.hold(f"key{index % 3}"):
                pass

    in_threads(8, hold)
    assert len(flight) == 0


def test_an_error_frees_the_key():
    flight = SingleFlight()
    with suppress(ValueError), flight.hold("key"):
        raise ValueError
    with flight.hold("key"):
        assert len(flight) == 1
    assert len(flight) == 0


def test_the_wait_is_bounded():
    flight = SingleFlight(max_wait_seconds=0.02)
    entered = []
    with flight.hold("key"):
        in_threads(2, lambda number: entered.append(flight.hold("key").__enter__()))
    assert len(entered) == 2


def test_a_negative_wait_is_refused():
    with pytest.raises(CacheError, match="max_wait_seconds=-1 must be >= 0"):
        SingleFlight(-1)
