"""The shares of the bias that methods remove, worked by hand, and the questions that are asked."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.positions import PositionRow
from rag_posfix.lab.claims.causes import (
    MEAN,
    METHODS,
    REMOVED,
    WORST,
    compare_bias,
    key_value_questions,
    log_probabilities,
)
from rag_posfix.mitigations import MITIGATIONS


def values(numbers):
    return {name: entry["value"] for name, entry in numbers.items()}


def row(question, position, log_probability, condition="none"):
    return PositionRow(question, condition, position, "answer", 0.0, 0.0, log_probability, 0.0)


def test_the_share_is_of_the_spread_of_means_over_positions():
    unmodified = torch.tensor([[-1.0, -3.0], [-3.0, -3.0]])  # means -2 and -3: spread 1, worst -3, mean -2.5
    method = torch.tensor([[-2.0, -2.0], [-2.0, -2.5]])  # means -2 and -2.25: spread .25, worst -2.25, mean -2.125
    assert values(compare_bias(method, unmodified)) == pytest.approx({REMOVED: 0.75, WORST: 0.75, MEAN: 0.375})


def test_a_method_that_turns_the_bias_around_and_doubles_it_removes_less_than_nothing():
    unmodified = torch.tensor([[-1.0, -2.0, -3.0]])  # spread 2
    method = torch.tensor([[-5.0, -3.0, -1.0]])  # spread 4: 1 - 4 / 2 = -1; worst -5 + 3; mean -3 + 2
    assert values(compare_bias(method, unmodified)) == pytest.approx({REMOVED: -1, WORST: -2, MEAN: -1})


def test_intervals_are_of_paired_questions_a_gain_that_all_share_is_certain():
    unmodified = torch.tensor([[-1.0, -2.0], [-5.0, -9.0], [-0.5, -0.25], [-7.0, -20.0]])
    numbers = compare_bias(unmodified + 1, unmodified)
    assert numbers[REMOVED]["ci95"] == pytest.approx([0, 0], abs=1e-9)
    assert numbers[MEAN]["ci95"] == pytest.approx([1, 1])
    other = compare_bias(torch.full((4, 2), -3.0), unmodified)
    low, high = other[MEAN]["ci95"]
    # The gains by question are -3 + 1.5, -3 + 7, -3 + .375 and -3 + 13.5: the mean is 10.375 / 4, and they differ.
    assert other[MEAN]["value"] == pytest.approx(2.59375)
    assert low < 1 < 5 < high
    assert other[REMOVED] == {"value": 1.0, "ci95": [1.0, 1.0], "n": 4}


def test_log_probabilities_are_by_question_and_position_of_one_condition():
    rows = [row("a", 0, -1.0), row("b", 0, -2.0), row("a", 3, -4.0), row("a", 0, -9.0, "other"), row("b", 3, -3.0)]
    assert log_probabilities(rows, "none").tolist() == [[-1.0, -4.0], [-2.0, -3.0]]
    with pytest.raises(EvaluationError, match="none: log_probability=None; use a model in this process"):
        log_probabilities([row("a", 0, None)], "none")


def test_the_passage_of_the_key_alone_has_the_answer():
    first, second = key_value_questions(2, 5)
    assert first.question != second.question
    for example in (first, second):
        (gold,), (answer,) = example.gold, example.answers
        key = example.question.rstrip("?").split()[-1]
        assert gold.page_content == f"The value of the key {key} is {answer}."
        assert len(example.distractors) == 4
        assert all(key not in other.page_content for other in example.distractors)
        assert [d is gold for d in example.documents(5, 3)] == [False, False, False, True, False]


def test_every_method_of_a_cause_is_registered_under_its_name():
    assert set(METHODS) <= set(MITIGATIONS.names())
