"""A probe asks for what is in one piece alone."""

from __future__ import annotations

import gzip
import json

import pytest

from benchmarks.val_probes import PROBES, questions

ROWS = {
    "document": [{"sentence": f"A fox saw {n} hens. ", "piece": f"saw {n}"} for n in (1, 11, 2, 3)],
    "code": [
        {"function_name": f"f{n}x", "function_define": f"    y = {n % 3}", "piece": f"y = {n % 3}"} for n in range(4)
    ],
    "database": [{"id": f"Q{n}", "label": f"name {n}", "dcpt": "a lake"} for n in (1, 12, 2, 3)],
}


@pytest.mark.parametrize("probe", PROBES)
def test_what_a_question_names_and_its_answer_are_in_the_gold_piece_alone(probe, tmp_path):
    name, ask, _ = PROBES[probe]
    with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS[probe]))
    rows = list(questions(tmp_path, probe, 20, 4))
    unique = ROWS[probe][1:3] if probe == "code" else ROWS[probe][1:]  # y = 0 is in two functions, "saw 1" in "saw 11"
    asked = {question: (text, answer) for text, question, answer in map(ask, unique)}
    assert {row["question"] for row in rows} == set(asked)
    for row in rows:
        (gold,) = (piece["text"] for piece in row["ctxs"] if piece["isgold"])
        assert (gold, row["answers"][0]) == asked[row["question"]]
        assert len(row["ctxs"]) == 4
