"""Two records are compared by the questions of both, and differences within noise are said to be that."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rag_posfix.cli.main import app
from rag_posfix.evaluation.record import ExperimentRecord, write_record
from rag_posfix.measuring import comparison
from rag_posfix.measuring.report import report_page


def compare_records(*records):
    return comparison.compare_records(records)


def record(values, field="accuracy", arrangement="condition", question="question", **more):
    rows = [{question: f"q{n}", arrangement: "default", field: value, **more} for n, value in enumerate(values)]
    return ExperimentRecord({"kind": "positions", "model": "m", "summary": {}}, rows)


def test_a_difference_of_each_question_is_beyond_noise_and_has_the_sign_of_the_second():
    (difference,) = compare_records(record([0.0] * 8), record([1.0] * 8))
    assert (difference.first, difference.second, difference.n) == (0.0, 1.0, 8)
    assert difference.interval == (1.0, 1.0)
    assert difference.p == pytest.approx(2 / 2**8)  # of the signs of eight differences, all + and all -
    assert difference.is_better is True
    (reverse,) = compare_records(record([1.0] * 8), record([0.0] * 8))
    assert reverse.is_better is False


def test_the_ceiling_and_the_floor_are_told_in_words():
    records = [record([1.0] * 3), record([1.0] * 3)]
    for each in records:
        for row, name in zip(each.rows, ("closed_book", "gold_only", "none"), strict=True):
            row["condition"] = name
    told = [difference.sentence.partition(":")[0] for difference in compare_records(*records)]
    assert told == ["no passages", "gold passage alone", "none"]


def test_a_difference_that_questions_do_not_share_is_noise():
    (difference,) = compare_records(record([0.0, 1.0] * 4), record([1.0, 0.0] * 4))
    assert difference.is_better is None
    assert "no difference beyond noise" in difference.sentence
    assert difference.p == 1.0


def test_fewer_answers_that_change_are_better():
    (difference,) = compare_records(record([True] * 8, "changed"), record([False] * 8, "changed"))
    assert difference.is_better is True
    assert difference.sentence.startswith("default: better, answers that change 1.00 and 0.00")


def test_rows_of_one_question_are_one_observation_and_repetitions_none():
    rows = [{"question": "a", "condition": "none", "gold_position": n, "accuracy": n / 2} for n in range(3)]
    again = {"question": "a", "condition": "none", "kind": "repeat", "accuracy": 9.0}
    first = ExperimentRecord({}, [*rows, again])
    second = ExperimentRecord({}, [{"question": "a", "condition": "none", "accuracy": 1.0}])
    (difference,) = compare_records(first, second)
    assert (difference.first, difference.second, difference.n) == (0.5, 1.0, 1)


def test_records_are_compared_in_pairs_alone():
    assert compare_records(record([1.0])) is None
    assert compare_records(*[record([1.0])] * 3) is None


def test_only_questions_and_arrangements_of_both_are_compared():
    longer = record([1.0] * 5)
    other = ExperimentRecord({}, [{"question": "q0", "condition": "else", "accuracy": 1.0}])
    assert [difference.n for difference in compare_records(record([1.0] * 2), longer)] == [2]
    assert compare_records(longer, other) == []
    assert compare_records(longer, record([1.0], "changed")) == []
    gate = record([1.0] * 3, "right", "arrangement", "id")
    assert [difference.criterion for difference in compare_records(gate, gate)] == ["right answers"]


def test_the_page_and_the_command_say_it(tmp_path):
    paths = [
        write_record(tmp_path, name, {"kind": "positions", "summary": {}}, record(values).rows)
        for name, values in (("a", [0.0] * 8), ("b", [1.0] * 8))
    ]
    arguments = ["report", *map(str, paths), "--out", str(tmp_path / "page.html")]
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code == 0, said.output
    assert "default: better, accuracy 0.00 and 1.00" in said.stdout
    result = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [entry["is_better"] for entry in result["compared"]] == [True]
    assert "default: better" in (tmp_path / "page.html").read_text("utf-8")
    assert "nothing is compared" in report_page([record([1.0]), ExperimentRecord({"kind": "x", "summary": {}})])
