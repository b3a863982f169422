"""The rows and the pooling rule of canonical rotations, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.mitigations import create
from rag_posfix.plan.plan import RowScores
from tests.support.tiny import loaded_model, toy_layout


@pytest.fixture(scope="module")
def shape():
    return loaded_model().spec.shape


def rows_of(shape, given, **parameters):
    plan = create("canonical_rotations", parameters).plan(toy_layout((3, 4, 5), relevance=given), shape)
    return [row.passages for row in plan.rows]


def test_each_passage_stands_last_once_in_a_rotation_of_the_ascending_list(shape):
    # Ascending relevance: 2, 0, 1.
    assert rows_of(shape, (0.5, 0.9, 0.1)) == [(2, 0, 1), (1, 2, 0), (0, 1, 2)]
    assert rows_of(shape, (0.5, 0.9, 0.1), rows=1) == [(2, 0, 1)]


def test_another_prompt_may_use_each_row_up_to_the_end_of_a_run(shape, monkeypatch):
    monkeypatch.setattr("rag_posfix.plan.layout.READ_TOGETHER", 8)
    # Five tokens of prefix, then passages of 5, 3, 4; of 4, 5, 3; of 3, 4, 5: runs of 10, 7; of 9, 8; of 8, 9.
    plan = create("canonical_rotations").plan(toy_layout((3, 4, 5), relevance=(0.5, 0.9, 0.1)), shape)
    assert [row.reusable for row in plan.rows] == [(10, 17), (9, 17), (8, 17)]


@pytest.mark.parametrize(
    ("parameters", "expected", "first"),
    [
        # weight 1: 4 : 2 : 1; the answer so far has probability 1/4 under the first row: 1 : 2 : 1.
        # Token 0: (.9 + 2 * .5 + .1) / 4 = .5.
        ({}, [1 / 4, 2 / 4, 1 / 4], 0.5),
        # weight 2: 16 : 4 : 1, with the answer 4 : 4 : 1. Token 0: (4 * .9 + 4 * .5 + .1) / 9 = 5.7 / 9.
        ({"relevance_weight": 2.0}, [4 / 9, 4 / 9, 1 / 9], 5.7 / 9),
        # weight 0: the answer alone, 1 : 4 : 4. Token 0: (.9 + 4 * .5 + 4 * .1) / 9 = 3.3 / 9.
        ({"relevance_weight": 0.0}, [1 / 9, 4 / 9, 4 / 9], 3.3 / 9),
    ],
)
def test_the_mixture_by_hand(shape, parameters, expected, first):
    plan = create("canonical_rotations", parameters).plan(toy_layout((3, 4, 5), relevance=(0.8, 0.4, 0.2)), shape)
    log_probs, weights = plan.combine(
        RowScores(
            log_probs=torch.tensor([(0.9, 0.1), (0.5, 0.5), (0.1, 0.9)]).log(),
            question=torch.zeros(3),
            answer=torch.tensor([math.log(0.25), 0.0, 0.0]),
            confidence=torch.zeros(3),
        )
    )
    assert log_probs.exp().tolist() == pytest.approx([first, 1 - first])
    assert weights.tolist() == pytest.approx(expected)
