"""Questions with two gold passages: reading HotpotQA rows, and placing both passages."""

import json
from dataclasses import replace

import pytest

from rag_posfix.cli.options import parse_gold_positions
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.answers.position_summary import summarize_positions
from rag_posfix.evaluation.answers.positions import answer_at_positions
from rag_posfix.evaluation.data.questions import load_examples, position_label
from tests.support.tiny_evaluation import Alphabetical, tiny_engine

ROW = {
    "id": "5a71",
    "question": "Which of both is older? ",
    "answer": "Alpha",
    "supporting_facts": [["Alpha", 0], ["Beta", 1], ["Beta", 0]],
    "context": [
        ["Gamma", ["Gamma is new."]],
        ["Beta", ["Beta is old.", " It was built in 1900."]],
        ["Delta", ["Delta is blue."]],
        ["Alpha", ["Alpha is from 1800."]],
    ],
}


@pytest.fixture
def examples(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    return load_examples(path)


def test_paragraphs_of_the_supporting_facts_are_gold(examples):
    (example,) = examples
    assert (example.id, example.question, example.answers) == ("5a71", "Which of both is older?", ("Alpha",))
    assert [one.metadata["title"] for one in example.gold] == ["Beta", "Alpha"]
    assert example.gold[0].page_content == "Beta is old. It was built in 1900."
    assert [one.metadata["title"] for one in example.distractors] == ["Gamma", "Delta"]


@pytest.mark.parametrize(
    ("count", "positions", "titles"),
    [
        (4, (0, 3), ["Beta", "Gamma", "Delta", "Alpha"]),
        (4, (3, 0), ["Alpha", "Gamma", "Delta", "Beta"]),
        (3, (1, 2), ["Gamma", "Beta", "Alpha"]),
        (4, None, ["Beta", "Alpha", "Gamma", "Delta"]),
    ],
)
def test_gold_passages_stand_where_they_are_put(examples, count, positions, titles):
    assert [one.metadata["title"] for one in examples[0].documents(count, positions)] == titles


@pytest.mark.parametrize(
    ("count", "positions", "message"),
    [
        (4, 1, "gold position 1 places 1 passages, but question 5a71 has 2 gold"),
        (4, (1, 1), r"gold position 1\+1 must be between 0 and 3, each once"),
        (4, (0, 4), r"gold position 0\+4 must be between 0 and 3"),
        (1, (0, 1), "documents=1 must be between 2 and 4"),
    ],
)
def test_positions_that_cannot_be_are_refused(examples, count, positions, message):
    with pytest.raises(EvaluationError, match=message):
        examples[0].documents(count, positions)


def test_gold_that_is_no_tuple_of_documents_is_refused(examples):
    with pytest.raises(EvaluationError, match="question 5a71: gold is a Document, must be a tuple of one document"):
        replace(examples[0], gold=examples[0].gold[0])
    with pytest.raises(EvaluationError, match="gold is a tuple"):
        replace(examples[0], gold=())


def test_a_supporting_title_that_the_context_lacks_is_told(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**ROW, "supporting_facts": [["Alpha", 0], ["Omega", 0]]}), encoding="utf-8")
    with pytest.raises(EvaluationError, match="supporting_facts name 2 titles, of which the context has 1"):
        load_examples(path)


def test_positions_of_two_gold_passages_are_read_from_the_command_line():
    assert parse_gold_positions("0+9,4,1+2") == [(0, 9), 4, (1, 2)]
    assert position_label((0, 9)) == "0+9"
    with pytest.raises(ConfigError, match="for example 0,4,9, or 0"):
        parse_gold_positions("0+,1")


def test_positions_are_answered_in_pairs_and_both_passages_count_for_the_rank(examples):
    rows = answer_at_positions(
        tiny_engine(600), examples, [MitigationChoice("none"), MitigationChoice("context_experts")],
        gold_positions=[(0, 1), (0, 3)], n_documents=4, reranker=Alphabetical(), max_new_tokens=2,
    )  # fmt: skip
    summary = summarize_positions(rows)
    assert list(summary["mitigations"]["none"]["positions"]) == ["0+1", "0+3"]
    # Alphabetical order: Alpha, Beta, Delta, Gamma. The lower of both gold passages is second.
    assert {row.gold_rank for row in rows if row.gold_position} == {2}
    assert summary["mitigations"]["none"]["recall_at_1"] == 0
    assert summary["mitigations"]["none"]["recall_at_2"] == 1
    assert summary["mitigations"]["context_experts"]["spread_log_probability"] == 0
