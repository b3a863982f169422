"""Sentences and figures of answer experiments say what their summaries hold."""

import os
import stat
import sys

import pytest

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.experiment import position_verdicts
from rag_posfix.evaluation.answers.positions import evaluate_permutations, evaluate_positions
from rag_posfix.evaluation.figures import CAPTIONS, captioned, draw_permutations, draw_positions, svg_of
from rag_posfix.evaluation.record import write_whole
from tests.support.tiny_evaluation import EXAMPLES, Alphabetical, tiny_engine


def method(changes, spread=0.0, versus=None):
    found = {"answers_that_change": changes, "spread_log_probability": spread}
    if versus is not None:
        difference, interval = versus
        found["versus_none"] = {
            "worst_minus_best_log_probability": difference, "ci95": interval, "worst_minus_best_accuracy": -0.125,
            "mcnemar_p": 0.25,
        }  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("versus", "expected"),
    [((0.5, [0.25, 0.75]), "higher than"), ((-0.5, [-0.75, -0.25]), "lower than"),
     ((0.1, [-0.1, 0.3]), "not distinguishable from"), ((0.5, [0.0, 0.75]), "not distinguishable from"),
     ((-0.5, [-0.75, 0.0]), "not distinguishable from")],
)  # fmt: skip
def test_a_method_is_compared_with_the_best_position_of_the_baseline(versus, expected):
    baseline, free = position_verdicts({"none": method(0.85, 0.64), "free": method(0.0, versus=versus)})
    assert baseline == (
        "none: 85% of the answers of the unmodified model change with the position of the gold passage, by 0.64 in "
        "mean log-probability between the best and the worst position."
    )
    assert free.startswith(
        "free: no answer changes with the position of the gold passage; its log-probability at its worst position is "
        f"{expected} that of none at its best ({versus[0]:+.2f}, "
    )
    assert free.endswith("its accuracy -0.12 (p = 0.25).")


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def run(experiment, engine, out=None, **options):
    return experiment(
        EXAMPLES[:2], [MitigationChoice("none"), MitigationChoice("context_experts")], documents=3, max_tokens=2,
        engine=engine, reranker=Alphabetical(), out=out, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("experiment", "options", "draw"),
    [(evaluate_positions, {"gold_positions": [0, 2]}, draw_positions), (evaluate_permutations, {}, draw_permutations)],
)
@pytest.mark.slow
def test_a_figure_and_a_sentence_per_method_come_with_the_record(experiment, options, draw, engine, tmp_path):
    record = run(experiment, engine, tmp_path, **options)
    found = record.to_json()
    assert len(found["verdict"]) == 2
    assert record.files["png"].read_bytes().startswith(b"\x89PNG")
    assert record.files["svg"].read_text("utf-8") == svg_of(
        captioned(draw(record.head), CAPTIONS[record.head["kind"]])
    )
    umask = os.umask(0)
    os.umask(umask)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o666 & ~umask}, "the record, its rows, the journal and the figures"


def test_rows_hold_the_question_the_accepted_answers_and_the_passages(engine):
    row = next(row for row in run(evaluate_positions, engine, gold_positions=[2]).rows if row["gold_position"] == 2)
    assert (row["asked"], row["accepted"], row["passages"]) == ("Why0", ("so",), ("d00", "d01", "g0"))
    shuffled = run(evaluate_permutations, engine, orders=2).rows[2]
    assert sorted(shuffled["passages"]) == ["d00", "d01", "g0"]
    assert shuffled["passages"] == tuple(["g0", "d00", "d01"][index] for index in shuffled["order"])


def test_without_matplotlib_there_is_a_record_and_a_hint(engine, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    record = run(evaluate_positions, engine, tmp_path, gold_positions=[0])
    assert set(record.files) == {"record"}
    assert "no figure was drawn: matplotlib is not installed" in caplog.text


def test_a_file_that_cannot_be_completed_leaves_the_old_one(tmp_path):
    path = tmp_path / "new" / "file"
    write_whole(path, [b"old"])

    def broken():
        yield b"new"
        raise OSError("no space left")

    with pytest.raises(EvaluationError, match=r"cannot write .*file: no space left; choose another --out"):
        write_whole(path, broken())
    assert path.read_bytes() == b"old"
    assert [one.name for one in path.parent.iterdir()] == ["file"]


def test_pairs_of_positions_are_drawn_in_their_order():
    scores = {"log_probability": -1.0}
    head = {
        "model": "m", "data": {"name": None}, "settings": {"documents": 10},
        "summary": {"n": 2, "mitigations": {"none": {"positions": {"0+1": scores, "0+9": scores}}},
                    "gold_only": scores, "closed_book": scores},
    }  # fmt: skip
    (axes,) = draw_positions(head).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0+1", "0+9"]
    assert axes.get_title(loc="left") == "m, 2 questions of given questions"
