"""The shares of the bias that methods remove, worked by hand, and what is said of them."""

from __future__ import annotations

import pytest

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.causes import (
    CAUSES,
    MEAN,
    PARAMETERS,
    REMOVED,
    WORST,
    compare_bias,
    compare_causes,
    correcting_methods,
    explain,
    log_probabilities,
)
from rag_posfix.evaluation.answers.positions import PositionRow
from rag_posfix.evaluation.data.questions import key_value_questions
from rag_posfix.mitigations import MITIGATIONS
from tests.support.tiny_evaluation import tiny_engine


def values(numbers):
    return {name: entry["value"] for name, entry in numbers.items()}


def row(question, position, log_probability, condition="none"):
    place = {"question": question, "condition": condition, "gold_position": position}
    return PositionRow("answer", 0.0, 0.0, log_probability, 0.0, **place)


def test_the_share_is_of_the_spread_of_means_over_positions():
    unmodified = [[-1.0, -3.0], [-3.0, -3.0]]  # means -2 and -3: spread 1, worst -3, mean -2.5
    method = [[-2.0, -2.0], [-2.0, -2.5]]  # means -2 and -2.25: spread .25, worst -2.25, mean -2.125
    assert values(compare_bias(method, unmodified)) == pytest.approx({REMOVED: 0.75, WORST: 0.75, MEAN: 0.375})


def test_a_method_that_turns_the_bias_around_and_doubles_it_removes_less_than_nothing():
    unmodified = [[-1.0, -2.0, -3.0]]  # spread 2
    method = [[-5.0, -3.0, -1.0]]  # spread 4: 1 - 4 / 2 = -1; worst -5 + 3; mean -3 + 2
    assert values(compare_bias(method, unmodified)) == pytest.approx({REMOVED: -1, WORST: -2, MEAN: -1})


def test_intervals_are_of_paired_questions_a_gain_that_all_share_is_certain():
    unmodified = [[-1.0, -2.0], [-5.0, -9.0], [-0.5, -0.25], [-7.0, -20.0]]
    numbers = compare_bias([[a + 1, b + 1] for a, b in unmodified], unmodified)
    assert numbers[REMOVED]["ci95"] == pytest.approx([0, 0], abs=1e-9)
    assert numbers[MEAN]["ci95"] == pytest.approx([1, 1])
    other = compare_bias([[-3.0, -3.0]] * 4, unmodified)
    low, high = other[MEAN]["ci95"]
    # The gains by question are -3 + 1.5, -3 + 7, -3 + .375 and -3 + 13.5: the mean is 10.375 / 4, and they differ.
    assert other[MEAN]["value"] == pytest.approx(2.59375)
    assert low < 1 < 5 < high
    assert other[REMOVED] == {"value": 1.0, "ci95": [1.0, 1.0], "n": 4}


def test_log_probabilities_are_by_question_and_position_of_one_condition():
    rows = [row("a", 0, -1.0), row("b", 0, -2.0), row("a", 3, -4.0), row("a", 0, -9.0, "other"), row("b", 3, -3.0)]
    assert log_probabilities(rows, "none") == [[-1.0, -4.0], [-2.0, -3.0]]
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


def test_every_method_of_a_cause_is_registered_and_one_without_its_parameters_is_not_tried():
    assert set(CAUSES) <= set(MITIGATIONS.names())
    every = correcting_methods({"hidden_scaling": {"channel": 3}})
    assert {spec.name: spec.parameters for spec in every} == {
        **{name: {} for name in CAUSES}, **PARAMETERS, "hidden_scaling": {"channel": 3},
    }  # fmt: skip
    assert {spec.name for spec in correcting_methods()} == set(CAUSES) - {"hidden_scaling"}


def test_questions_are_answered_four_at_a_time_while_there_is_time_and_unsupported_methods_are_left_out():
    tried, every = [], correcting_methods({"hidden_scaling": {"channel": 999}})
    methods = [spec for spec in every if spec.name in {"blended", "set_prompting", "hidden_scaling"}]
    found = compare_causes(
        tiny_engine(512), key_value_questions(6, 2), methods, gold_positions=[0, 1], documents=2,
        in_time=lambda done: tried.append(done) or done < 4,
    )  # fmt: skip
    assert tried == [4]
    assert found["questions"] == found["spread"]["n"] == 4
    assert [*found["left_out"]] == ["hidden_scaling:channel=999"]
    blended, sets = found["methods"].values()
    assert (blended["name"], sets["name"]) == ("blended", "set_prompting")
    assert sets[REMOVED]["ci95"] == pytest.approx([1, 1])
    assert blended[REMOVED]["value"] != pytest.approx(1)


def found(**methods):
    """The result for methods with (removed, low, high) and (worst, low, high)."""
    names = (REMOVED, WORST)
    entries = {
        name: {
            "name": name, "cause": CAUSES[name],
            **{n: {"value": v, "ci95": [low, high], "n": 9} for n, (v, low, high) in zip(names, numbers, strict=True)},
        }
        for name, numbers in methods.items()
    }  # fmt: skip
    return {"questions": 9, "spread": {"value": 1.5}, "methods": entries}


def test_the_best_method_of_each_cause_that_is_seen_is_named_and_the_one_that_helps_most():
    text = explain(
        found(
            blended=((0.4, 0.2, 0.6), (0.1, -0.1, 0.3)),
            multi_base=((0.1, 0.05, 0.2), (0.2, 0.1, 0.3)),
            head_scaling=((0.3, 0.1, 0.5), (0.9, -0.1, 1.9)),
            stable_mask=((0.8, -0.1, 1.0), (-3.0, -4.0, -2.0)),
            inter_document=((1.0, 1.0, 1.0), (0.5, 0.2, 0.8)),
        )
    )
    assert text == (
        "Causes, by 9 questions with a spread of 1.50 over positions: causal mask explains 40% (20% to 60%) of the "
        "spread (blended); RoPE's distance decay explains 30% (10% to 50%) of the spread (head_scaling). "
        "The worst position gains most with inter_document: +0.50 (+0.20 to +0.80)."
    )


def test_a_bias_without_a_known_cause_and_without_a_method_that_helps_is_said_so():
    text = explain(found(multi_base=((0.1, -0.2, 0.2), (0.2, -0.1, 0.3)), set_prompting=((1, 1, 1), (-1, -2, -0.5))))
    assert text.endswith(
        "positions: no known cause is seen beyond noise. No method raises the log-probability at the worst position "
        "beyond noise."
    )
