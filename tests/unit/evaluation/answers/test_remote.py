"""Answer experiments on a server: accuracy and changes are measured, log-probabilities reported as absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.evaluation import evaluate_permutations, evaluate_positions
from rag_posfix.evaluation.answers.experiment import parse_arrangement
from rag_posfix.settings import Settings
from tests.support.tiny_evaluation import EXAMPLES, Alphabetical
from tests.support.upstream import first_passage, upstream

ARRANGEMENTS = [parse_arrangement("none"), parse_arrangement("/relevance/none")]


def test_an_order_by_scores_changes_no_answer_and_the_given_order_does(tmp_path: Path):
    with upstream(first_passage) as server:
        record = evaluate_permutations(
            EXAMPLES, ARRANGEMENTS, orders=6, documents=3, reranker=Alphabetical(),
            settings=Settings(model=server.model), out=tmp_path,
        )  # fmt: skip
    assert len(server.bodies) == 3 * 2 * 6
    found = record.to_json()["mitigations"]
    # All 6 orders of 3 passages: another passage is first in 4 of the 5 orders other than the first.
    assert found["none"]["flip_rate"] == pytest.approx(4 / 5)
    assert found["/relevance/none"]["flip_rate"] == 0.0
    assert found["none"]["max_logit_difference"] is None
    assert found["none"]["log_probability"] is None
    assert "does not score given answers" in record.head["summary"]["not_measured"]["log_probability"]
    assert (record.head["model"], record.head["device"], record.head["dtype"]) == ("tiny", "remote", None)


@pytest.mark.slow
def test_accuracy_by_position(tmp_path: Path):
    examples = [example.__class__(**{**vars_of(example), "answers": ("gold",)}) for example in EXAMPLES]
    settings = {"gold_positions": (0, 2), "documents": 3, "reranker": Alphabetical(), "out": tmp_path}
    with upstream(first_passage) as server:
        where = Settings(model=server.model)
        record = evaluate_positions(examples, ARRANGEMENTS, settings=where, **settings)
        asked = len(server.bodies)
        again = evaluate_positions(examples, ARRANGEMENTS, settings=where, **settings)
        assert len(server.bodies) == asked  # from the journal
    found = record.to_json()["mitigations"]["none"]
    assert [found["positions"][place]["accuracy"] for place in ("0", "2")] == [1.0, 0.0]
    assert found["positions"]["0"]["log_probability"] is None
    assert found["spread_log_probability"] is None
    assert record.to_json()["mitigations"]["/relevance/none"]["versus_none"]["ci95"] is None
    assert "by 1.00 in accuracy" in record.to_json()["verdict"][0]
    assert again.to_json()["mitigations"] == record.to_json()["mitigations"]


def vars_of(example):
    return {name: getattr(example, name) for name in ("id", "question", "answers", "gold", "distractors")}


def test_methods_that_need_the_weights_are_refused_before_a_request():
    with upstream(first_passage) as server:
        settings = Settings(model=server.model)
        with pytest.raises(UnsupportedModelError, match="mitigation='none'"):
            evaluate_permutations(EXAMPLES, [parse_arrangement("default")], documents=3, orders=2, settings=settings)
        with pytest.raises(ConfigError, match="is on a server"):
            evaluate_positions(EXAMPLES, ARRANGEMENTS, documents=3, gold_positions=(0,), reuse=True, settings=settings)
    assert server.bodies == []
