"""Pieces of VaL are questions: each among the pieces after it that have neither what is asked nor the answer."""

from __future__ import annotations

import json

import pytest

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.questions import load_examples
from tests.support.outside_data import outside_data

SENTENCES = [
    {"sentence": "The cat sat on the mat at noon.", "piece": "sat on the"},
    {"sentence": "A dog sat on the cat.", "piece": "A dog"},
    {"sentence": "Fish swim.", "piece": "Fish"},
]
FUNCTIONS = [
    {"function_name": name, "function_define": f"    {line}\n    return 1", "piece": line}
    for name, line in (("run", "a = 1"), ("stop", "b = 2"), ("run_all", "c = 3"))
]
ENTITIES = [{"id": f"Q{n}", "label": f"Label {n}", "dcpt": "a thing"} for n in (1, 2, 11)]


def written(tmp_path, rows):
    file = tmp_path / "pieces.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


@pytest.mark.parametrize(("rows", "question", "answer", "gold", "others"), [
    (SENTENCES, "Which sentence has the words 'sat on the'?", SENTENCES[0]["sentence"], SENTENCES[0]["sentence"],
     ["Fish swim."]),  # the second one has the words too
    (FUNCTIONS, "What is the name of the function with the line 'a = 1'?", "run",
     "def run():\n    a = 1\n    return 1", ["def stop():\n    b = 2\n    return 1"]),  # run_all has the answer
    (ENTITIES, "What is the label of the entity with the id Q1?", "Label 1",
     "<id: Q1, label: Label 1, description: a thing>", ["<id: Q2, label: Label 2, description: a thing>"]),
])  # fmt: skip
def test_a_piece_is_asked_for_among_others_that_cannot_answer(tmp_path, rows, question, answer, gold, others):
    first, *_ = load_examples(written(tmp_path, rows))
    assert (first.question, first.answers) == (question, (answer,))
    assert [document.page_content for document in first.gold] == [gold]
    assert [document.page_content for document in first.distractors] == others


def test_questions_are_skipped_and_limited_and_pieces_go_around(tmp_path):
    (second,) = load_examples(written(tmp_path, ENTITIES), limit=1, skip=1)
    assert second.id == "1"
    assert [document.id for document in second.distractors] == ["2", "0"]


def test_a_row_without_a_part_is_told(tmp_path):
    with pytest.raises(EvaluationError, match=r"pieces.jsonl:2 is not a row of VaL \(no 'piece'\); it needs sentence"):
        load_examples(written(tmp_path, [SENTENCES[0], {"sentence": "No words."}]))


@pytest.mark.parametrize("name", ["document_sentences", "code_functions", "database_entities"])
def test_the_files_of_the_paper_are_read(name):
    examples = load_examples(outside_data(f"film_val/{name}.jsonl.gz"), limit=20)
    assert len(examples) == 20
    assert {len(example.distractors) for example in examples} == {99}
