import math
import os
import threading
from contextlib import closing

import pytest

from rag_posfix.caching.tier import AdaptiveDeadline, DeadlineRunner
from tests.support.threads import in_threads


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


def test_it_leaves_a_hanging_operation_behind(runner):
    over = threading.Event()
    with pytest.raises(TimeoutError):
        runner.run(over.wait, 0.01)
    assert runner.running == 1
    assert runner.run(lambda: 42, 60) == 42
    over.set()


def test_an_operation_that_did_not_begin_in_time_never_does(runner):
    over, ran = threading.Event(), []
    for _ in range(2):
        with pytest.raises(TimeoutError):
            runner.run(over.wait, 0.01)
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
