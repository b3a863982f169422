"""Records that are kept verify under their new name; the records of this repository do."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.keep_record import RESULTS, join, keep, position_row
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.experiment import summarize_positions
from rag_posfix.evaluation.record import read_head, read_record, save_record

HEAD = {"kind": "permutations", "summary": {"n": 2}}
ROWS = [{"question": "a"}, {"question": "b"}]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_record_of_the_repository_verifies(path):
    record, head = read_record(path), read_head(path)
    assert len(record.rows) == head.get("rows", {"count": 0})["count"]


def test_every_file_of_rows_belongs_to_a_head():
    named = {read_head(path)["rows"]["file"] for path in RESULTS.glob("*.json") if "rows" in read_head(path)}
    assert {path.name for path in RESULTS.glob("*.jsonl.gz")} == named


NEWER = {
    "by_scorer", "mcnemar_p", "recall_at_1", "recall_at_2", "recall_at_3", "repeats", "reused", "sound", "verdict",
    "words", "worst_minus_best_accuracy", "worst_minus_best_accuracy_ci95", "worst_minus_worst_accuracy",
    "worst_minus_worst_accuracy_ci95",
}  # fmt: skip
"""Keys that summaries of early records lack; every other key is in each record."""


def differences(recorded, computed, key="summary"):
    """Yield where a recorded value is not the computed one, within 1e-9."""
    if isinstance(recorded, dict) and isinstance(computed, dict):
        missing = recorded.keys() ^ computed.keys()
        yield from (f"{key} > {name}" for name in missing if name in recorded or name not in NEWER)
        for name in recorded.keys() & computed.keys():
            yield from differences(recorded[name], computed[name], f"{key} > {name}")
    elif isinstance(recorded, list) and isinstance(computed, list) and len(recorded) == len(computed):
        for place, pair in enumerate(zip(recorded, computed, strict=True)):
            yield from differences(*pair, f"{key} > {place}")
    elif isinstance(recorded, float) and isinstance(computed, float):
        if not math.isclose(recorded, computed, rel_tol=0, abs_tol=1e-9):
            yield f"{key}: {recorded} is recorded, {computed} computed"
    elif recorded != computed:
        yield f"{key}: {recorded} is recorded, {computed} computed"


@pytest.mark.parametrize(
    "name",
    [
        "positions-litm-10",  # the earliest
        "positions-litm-10-choice",
        "positions-litm-20-widened",
        "positions-xquad-5-float32-scores",
        "positions-litm-10-forty-echo",  # a hostile passage
        "positions-gemma-litm-10-poison",
        "positions-qwen05-litm-10-injection",
        "positions-qwen15-litm-6",
        "positions-vllm-qwen15-litm-10",  # a remote generator: no log-probabilities
        "positions-gemma-hotpotqa-10-default",  # two gold passages
    ],
)
def test_the_summary_of_a_record_follows_from_its_rows(name):
    record = read_record(RESULTS / f"{name}.json")
    computed = summarize_positions([position_row(row) for row in record.rows])
    assert list(differences(record.summary, computed)) == []


def test_a_record_is_kept_under_another_name(tmp_path):
    save_record(tmp_path / "positions-2026.json", HEAD, ROWS)
    keep(tmp_path / "positions-2026.json", tmp_path / "kept.json")
    kept = read_record(tmp_path / "kept.json")
    assert (kept.head, list(kept.rows)) == (HEAD, ROWS)
    assert read_head(tmp_path / "kept.json")["rows"]["file"] == "kept.jsonl.gz"


def test_the_summary_of_a_position_experiment_is_made_anew_from_its_rows(tmp_path):
    rows = [
        {"question": "a", "condition": "none", "gold_position": position, "answer": "x", "accuracy": accuracy,
         "accuracy_full_text": accuracy, "log_probability": -1.0, "seconds": 1.0, "reused": False, "gold_rank": 2}
        for position, accuracy in (([0, 1], 1.0), ([0, 9], 0.0))
    ]  # fmt: skip
    save_record(tmp_path / "one.json", {"kind": "positions", "model": "m", "summary": {}}, rows)
    keep(tmp_path / "one.json", tmp_path / "kept.json")
    kept = read_record(tmp_path / "kept.json")
    assert list(kept.rows) == rows
    assert kept.head["model"] == "m"
    assert kept.head["summary"]["mitigations"]["none"]["worst"] == 0.0
    assert list(kept.head["summary"]["mitigations"]["none"]["positions"]) == ["0+1", "0+9"]


def part(folder, skip, questions, *, commit="c1", accuracy=1.0, **changed):
    """Write the record of a position experiment over some questions of a file; return its path."""
    rows = [
        {"question": str(question), "condition": "none", "gold_position": 0, "answer": "x", "accuracy": accuracy,
         "accuracy_full_text": accuracy, "log_probability": -1.0, "seconds": 1.0, "reused": False, "gold_rank": 2}
        for question in questions
    ]  # fmt: skip
    settings = {
        "documents": 10, "hostile": "echo", "skip": skip, "limit": len(rows),
        "answers_of_earlier_runs_by": ["0.1.0 c0"],
    }  # fmt: skip
    head = {"kind": "positions", "versions": {"rag-posfix": "0.1.0"}, "git": commit, "model": "m", "dtype": "bfloat16",
            "settings": settings, "summary": {}}  # fmt: skip
    path = folder / f"from-{skip}.json"
    save_record(path, {**head, **changed}, rows)
    return path


def test_records_of_one_experiment_become_one_with_the_summary_of_all_their_rows(tmp_path):
    parts = [part(tmp_path, 4, "abc"), part(tmp_path, 7, "d", commit="c2", accuracy=0.0)]
    join(parts, tmp_path / "kept.json")
    kept = read_record(tmp_path / "kept.json")
    assert [row["question"] for row in kept.rows] == ["a", "b", "c", "d"]
    assert kept.head["settings"] == {
        "documents": 10, "hostile": "echo", "skip": 4, "limit": 4,
        "answers_of_earlier_runs_by": ["0.1.0 c0", "0.1.0 c1"],
    }  # fmt: skip
    assert kept.head["git"] == "c2"
    assert kept.summary["n"] == 4
    assert kept.summary["mitigations"]["none"]["worst"] == 0.75


@pytest.mark.parametrize(
    ("skip", "changed", "message"),
    [
        (8, {}, "begins after 8 questions, must after 7"),
        (6, {}, "begins after 6 questions, must after 7"),
        (7, {"dtype": "float32"}, "differs from .* in dtype"),
        (7, {"kind": "permutations"}, "is of kind 'permutations', must be of a position experiment"),
        (7, {"settings": {"documents": 20, "hostile": "echo", "skip": 7}}, "in documents"),
        (7, {"settings": {"documents": 10, "skip": 7}}, "in hostile"),
    ],
)
def test_records_that_are_no_continuation_are_not_joined(tmp_path, skip, changed, message):
    parts = [part(tmp_path, 4, "abc"), part(tmp_path, skip, "d", **changed)]
    with pytest.raises(EvaluationError, match=message):
        join(parts, tmp_path / "kept.json")
    assert not (tmp_path / "kept.json").exists()


def test_what_the_demo_printed_becomes_a_record_with_a_summary(tmp_path):
    def row(gold, answer, right, log_probability):
        return {"question": "q", "mitigation": "none", "gold": gold, "answer": answer, "right": right,
                "log_probability": log_probability}  # fmt: skip

    rows = [row("first", "a", True, -1.0), row("last", "b", False, -3.0)]
    (tmp_path / "demo.json").write_text(json.dumps({"model": "m", "rows": rows}))
    keep(tmp_path / "demo.json", tmp_path / "kept.json")
    kept = read_record(tmp_path / "kept.json")
    assert (kept.head["kind"], kept.head["model"], list(kept.rows)) == ("demo", "m", rows)
    assert kept.summary == {
        "mitigations": {
            "none": {
                "positions": {
                    "first": {"right": 1, "log_probability": -1.0}, "last": {"right": 0, "log_probability": -3.0}
                },
                "answers_that_change": 1,
            }
        },
        "n": 1,
    }  # fmt: skip
