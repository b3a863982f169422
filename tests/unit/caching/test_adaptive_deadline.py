from __future__ import annotations

import pytest

from rag_posfix.caching.adaptive_deadline import AdaptiveDeadline


def test_it_starts_at_the_shortest_and_stays_there_for_a_fast_store():
    deadline = AdaptiveDeadline(0.02, 0.2)
    assert deadline.seconds == 0.02
    for _ in range(100):
        deadline.record(0.001)
    assert deadline.seconds == 0.02


def test_it_follows_the_formula():
    deadline = AdaptiveDeadline(0.0, 100.0)
    deadline.record(1.0)
    assert deadline.seconds == pytest.approx(3.0)  # 1 + 4 x 1/2
    deadline.record(2.0)
    # deviation 0.5 + (1 - 0.5) / 4 = 0.625, latency 1 + 1/8
    assert deadline.seconds == pytest.approx(1.125 + 4 * 0.625)


def test_it_has_an_upper_bound_and_comes_down_again():
    deadline = AdaptiveDeadline(0.02, 0.2)
    for _ in range(20):
        deadline.record(5.0)
    assert deadline.seconds == 0.2
    for _ in range(200):
        deadline.record(0.001)
    assert deadline.seconds == 0.02
