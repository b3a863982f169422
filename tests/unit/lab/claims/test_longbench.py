"""LongBench's score by hand, its rows, and the claim on a tiny file of its form."""

from __future__ import annotations

import json

import pytest

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import silent
from rag_posfix.lab.claims import CLAIMS, with_longbench
from rag_posfix.lab.claims.longbench import GAIN, LONGBENCH, read_longbench, without_middle, word_f1
from tests.unit.lab.probing.probed import tiny_model

ROW = {
    "dataset": "hotpotqa", "input": "Who?", "context": "Passage 1:\nMary did it. " * 6, "answers": ["Mary", "Ann"],
    "length": 18, "language": "en", "all_classes": None, "_id": "a1",
}  # fmt: skip


def written(tmp_path, *rows):
    file = tmp_path / "hotpotqa.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    return file


def test_the_score_is_the_best_f1_of_words_over_accepted_answers():
    # Two of three words are common with the second: P = 2 / 3, R = 2 / 2, F1 = .8; articles do not count.
    assert word_f1("The tall Mary Smith", ("Ann", "mary smith.")) == pytest.approx(0.8)
    assert word_f1("Ann", ("Mary",)) == 0


def test_a_long_text_loses_its_middle():
    assert without_middle("abcdefgh", 0.5) == "abgh"
    assert without_middle("abcdefgh", 1.5) == "abcdefgh"


def test_rows_are_read_and_other_scores_and_files_are_refused(tmp_path):
    assert read_longbench(written(tmp_path, ROW, ROW), 1) == [("Who?", ROW["context"], ("Mary", "Ann"))]
    with pytest.raises(EvaluationError, match=r"has rows of \['gov_report'\], must have rows of: 2wikimqa"):
        read_longbench(written(tmp_path, {**ROW, "dataset": "gov_report"}), 1)
    with pytest.raises(EvaluationError, match=r"cannot be read \(KeyError: 'context'\); give JSON lines with dataset"):
        read_longbench(written(tmp_path, {"dataset": "qasper", "input": ""}), 1)


def test_a_file_makes_the_claim_measured_on_it(tmp_path):
    claims = with_longbench(list(CLAIMS), written(tmp_path, ROW, {**ROW, "input": "Where?"}))
    (claim,) = (claim for claim in claims if claim.name == "longbench")
    assert [other for other in claims if other is not claim] == [other for other in CLAIMS if other is not LONGBENCH]
    sizes = {"limit": 2, "tokens": 80, "new_tokens": 2, "factor": 0.5, "strings": 2, "length": 64}
    assert sizes.keys() == claim.small.keys()
    numbers = claim.measure(tiny_model(600), silent, **sizes).numbers
    assert numbers[GAIN]["n"] == 2
    assert claim.conditions[0].number == GAIN
