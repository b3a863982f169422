"""What a training adds, worked by hand from rows of two position experiments."""

from __future__ import annotations

import pytest

from benchmarks.fine_tuning import gains, scores


def rows(*values, method="none"):
    """Rows of one question after the other, each with a log-probability per place."""
    return [
        {"question": str(question), "condition": method, "gold_position": place, "log_probability": value}
        for question, of_places in enumerate(values)
        for place, value in zip((0, 9), of_places, strict=True)
    ]


def test_runs_without_a_place_are_left_out():
    closed = {"question": "0", "condition": "closed_book", "gold_position": None, "log_probability": -9.0}
    assert scores([closed, *rows((-1.0, -2.0))]) == {"none": {"0": {"0": -1.0}, "9": {"0": -2.0}}}


def test_gains_are_differences_of_means_and_of_the_worst_places():
    before = scores([*rows((-4.0, -1.0), (-2.0, -3.0)), *rows((-5.0, -5.0), (-5.0, -5.0), method="set")])
    after = scores(rows((-1.0, -1.0), (-1.0, -2.0)))
    found = gains(before, after)
    assert list(found) == ["none"]
    # Means before: -3 and -2; after: -1 and -1.5.
    means = {name: one["mean"] for name, one in found["none"].items()}
    assert means == pytest.approx({"0": 2.0, "9": 0.5, "worst": 1.5, "spread": -0.5})
    # Two questions: every resample has a gain of the first place between those of the questions, 3 and 1.
    assert found["none"]["0"]["ci95"] == pytest.approx([1.0, 3.0])
