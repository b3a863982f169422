"""The default against other methods, paired by question, over data sets."""

from __future__ import annotations

import pytest

from benchmarks.against_default import compare, table_of
from benchmarks.tables import DEFAULT
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import ExperimentRecord


def record(answers, model="small", data="file", **head):
    """Return a record of rows (condition, question, place, accuracy, log-probability)."""
    names = ("condition", "question", "gold_position", "accuracy", "log_probability")
    return ExperimentRecord(
        {"model": model, "model_fingerprint": model, "data": {"sha256": data}, **head},
        [dict(zip(names, answer, strict=True)) for answer in answers],
    )


METHODS = (DEFAULT, "none")
FIRST = record(
    [
        ("gold_only", "a", None, 1.0, 0.0),
        (DEFAULT, "a", 0, 1.0, -1.0),
        (DEFAULT, "b", 0, 0.0, -2.0),
        ("none", "a", 0, 1.0, -2.0),
        ("none", "a", 4, 0.0, -4.0),
        ("none", "b", 0, 0.0, -2.0),
        ("none", "b", 4, 0.0, -4.0),
        ("committee", "b", 0, 1.0, -1.5),
    ]
)
SECOND = record([(DEFAULT, "a", 0, 0.0, -3.0), ("none", "a", 0, 1.0, -1.0)], data="another file")


def test_a_question_counts_once_and_of_each_record():
    summary = compare({"set": [FIRST, SECOND]})
    # none: a of the first .5 at -3, b 0 at -3, a of the second 1 at -1: the default is .5, 0 and -1 above them.
    assert summary["none"]["all"]["n"] == 3
    assert summary["none"]["all"]["accuracy"] == pytest.approx(-1 / 6)
    assert summary["none"]["all"]["log_probability"] == pytest.approx((2.0 + 1.0 - 2.0) / 3)
    assert summary["none"]["all"]["ci95"] == pytest.approx((-1.0, 0.5))
    assert summary["committee"]["set"]["accuracy"] == -1.0
    assert "gold_only" not in summary


def test_a_question_of_two_data_sets_is_resampled_with_both():
    """Among ten and among twenty passages the default is right on the same five of ten questions, ``none`` on none."""

    def of(**head):
        rows = [(method, f"{n}", 0, float(n < 5 and method == DEFAULT), -1.0) for n in range(10) for method in METHODS]
        return record(rows, **head)

    together = compare({"10": [of()], "20": [of()]})["none"]
    assert (together["all"]["n"], together["all"]["accuracy"]) == (10, 0.5)
    assert together["all"]["ci95"] == together["10"]["ci95"]
    apart = compare({"10": [of()], "20": [of(data="another file")]})["none"]["all"]
    assert (apart["n"], apart["accuracy"]) == (20, 0.5)
    assert apart["ci95"][0] > together["all"]["ci95"][0]
    assert apart["ci95"][1] < together["all"]["ci95"][1]


def test_a_question_that_two_records_of_a_set_hold_has_the_mean_of_both():
    rows = [(DEFAULT, "a", 0, 1.0, -1.0), ("none", "a", 0, 0.0, -1.0)]
    again, other = (record([(DEFAULT, q, 0, 1.0, -1.0), ("none", q, 0, 1.0, -2.0)]) for q in "ab")
    summary = compare({"set": [record(rows), again, other]})["none"]["set"]
    assert (summary["n"], summary["accuracy"], summary["log_probability"]) == (2, 0.25, 0.75)


def test_without_log_probabilities_accuracies_are_compared():
    rows = [(DEFAULT, "a", 0, 1.0, None), ("none", "a", 0, 0.0, -1.0)]
    summary = compare({"set": [record(rows)]})
    assert summary["none"]["all"]["log_probability"] is None
    (row,) = table_of(summary, ["set"])["rows"]
    assert row == ["`none`", "+1.00", "+1.000 [+1.000, +1.000]", "1", "-"]


def test_a_method_without_a_question_of_the_default_is_refused():
    rows = [(DEFAULT, "a", 0, 1.0, -1.0)], [("none", "a", 0, 0.0, -1.0)]
    with pytest.raises(EvaluationError, match="set: none has no question in a record with"):
        compare({"set": [record(each) for each in rows]})


def test_another_default_can_be_named():
    summary = compare({"set": [FIRST]}, default="none")
    assert set(summary) == {DEFAULT, "committee"}
    assert summary[DEFAULT]["set"]["accuracy"] == pytest.approx(-1 / 4)


def test_the_table_has_the_methods_of_every_data_set():
    summary = compare({"one": [FIRST], "two": [SECOND]})
    table = table_of(summary, ["one", "two"])
    assert table["columns"] == ["default minus", "one", "two", "all", "questions", "log-probability, all"]
    assert table["rows"] == [["`none`", "+0.25", "-1.00", "-0.167 [-1.000, +0.500]", "3", "+0.33"]]


def test_records_of_two_models_are_refused():
    with pytest.raises(EvaluationError, match="several models"):
        compare({"set": [FIRST, record([], model="large")]})
    with pytest.raises(EvaluationError, match="several prompt versions"):
        compare({"set": [FIRST, record([], prompt_version=2)]})
