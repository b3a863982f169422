"""The mixture of multi_base, worked by hand, and that each row reads under its own base."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from rag_posfix.plan.plan import Plan, RowPlan, RowScores
from tests.support.tiny import loaded_model, toy_layout


@pytest.fixture(scope="module")
def llama():
    return loaded_model()


def merged(*rows):
    log_probs = torch.tensor(rows).log()
    zeros = torch.zeros(len(rows))
    combine = create("multi_base").plan(toy_layout(), loaded_model().spec.shape).combine
    mixed, weights = combine(RowScores(log_probs, zeros, zeros, zeros))
    return mixed.exp().tolist(), weights.tolist()


def test_rows_are_weighted_by_the_probability_of_their_likeliest_token():
    # Likeliest: 0.8 and 0.4, weights 2/3 and 1/3. Token 0: 2/3 * 0.8 + 1/3 * 0.3 = 19/30; token 1: 2/3 * 0.1 + 1/3
    # * 0.4 = 6/30; token 2: 2/3 * 0.1 + 1/3 * 0.3 = 5/30.
    mixed, weights = merged((0.8, 0.1, 0.1), (0.3, 0.4, 0.3))
    assert weights == pytest.approx([2 / 3, 1 / 3])
    assert mixed == pytest.approx([19 / 30, 6 / 30, 5 / 30])


def test_rows_alike_stay_what_they_are():
    mixed, weights = merged((0.7, 0.2, 0.1), (0.7, 0.2, 0.1), (0.7, 0.2, 0.1))
    assert weights == pytest.approx([1 / 3] * 3)
    assert mixed == pytest.approx([0.7, 0.2, 0.1])


def test_weights_are_those_of_the_step_not_of_the_first_token(llama):
    layout = toy_layout()
    plan = create("multi_base").plan(layout, llama.spec.shape)
    steps = []

    def combine(scores):
        mixed, weights = plan.combine(scores)
        likeliest = scores.log_probs.exp().amax(dim=-1)
        steps.append((weights.tolist(), (likeliest / likeliest.sum()).tolist()))
        return mixed, weights

    running = Session(llama, layout, dataclasses.replace(plan, combine=combine))
    for token in (5, 9):
        running.next_log_probs()
        running.advance(token)
    running.next_log_probs()
    assert all(weights == pytest.approx(expected) for weights, expected in steps)
    assert len({tuple(weights) for weights, _ in steps}) == 3


def test_there_is_one_row_per_factor_and_factor_one_is_the_model_as_it_is(llama):
    plan = create("multi_base", {"factors": [1, 1.3, 0.5]}).plan(toy_layout(), llama.spec.shape)
    assert [row.rope_base_factor for row in plan.rows] == [None, 1.3, 0.5]


@pytest.mark.parametrize("factor", [2.5, 0.5])
def test_a_row_reads_as_a_model_with_that_base_does(factor, llama):
    layout = toy_layout()
    based = loaded_model(rope_parameters={"rope_type": "default", "rope_theta": 10000.0 * factor})
    assert llama.model.config.rope_parameters["rope_theta"] == 10000.0
    expected = Session(based, layout, Plan())
    found = Session(llama, layout, create("multi_base", {"factors": (factor,)}).plan(layout, llama.spec.shape))
    for token in (5, 9, 11):
        assert float((found.next_log_probs() - expected.next_log_probs()).abs().max()) < 1e-5
        found.advance(token)
        expected.advance(token)
    plain = Session(llama, layout, Plan()).next_log_probs()
    other = Session(llama, layout, Plan(rows=(RowPlan(rope_base_factor=factor),))).next_log_probs()
    assert float((plain - other).abs().max()) > 1e-4


def test_a_list_from_json_is_kept_as_a_tuple_and_numbers_that_are_equal_are_the_same_method():
    left, right = create("multi_base", {"factors": [1, 2]}), create("multi_base", {"factors": (1.0, 2.0)})
    assert left.factors == (1.0, 2.0)
    assert left.fingerprint() == right.fingerprint()
    assert left.fingerprint() != create("multi_base", {"factors": (2.0, 1.0)}).fingerprint()
