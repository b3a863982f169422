"""The time of a measurement, by a clock that stands still."""

from __future__ import annotations

from rag_posfix.measuring.choice import Budget


def test_how_many_questions_fit_is_told_by_the_pace():
    now = [100.0]
    budget = Budget(1.0, lambda: now[0])
    now[0] = 110.0
    # Three questions since the fourth second: two seconds each; 50 seconds are left, and 20 until the half.
    assert budget.fitting(3, 4.0) == 25
    assert budget.fitting(3, 4.0, 0.5) == 10
    now[0] = 170.0
    assert budget.fitting(3, 4.0) < 0
