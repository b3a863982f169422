"""The pooling rule of the committee, worked by hand, and its all-passages row."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import PlanConflictError
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import create
from rag_posfix.plan.plan import Plan, RowPlan, RowScores
from tests.support.tiny import loaded_model, toy_layout
from tests.support.toy_encoder import ToyEncoder


@pytest.fixture(scope="module")
def loaded():
    return loaded_model()


def plan_of(loaded, given, **parameters):
    return create("committee", parameters).plan(toy_layout((3, 4, 5), relevance=given), loaded.spec.shape)


def test_the_joint_row_reads_the_passages_by_relevance(loaded):
    last = plan_of(loaded, (0.5, 0.9, 0.1)).rows
    assert [row.all_passages for row in last] == [None] * 4 + [True]
    assert last[-1].passages == (2, 0, 1)
    assert plan_of(loaded, (0.5, 0.9, 0.1), joint_order="best_first").rows[-1].passages == (1, 0, 2)
    two = plan_of(loaded, (0.5, 0.9, 0.1), experts=2).rows
    assert sorted(row.passages for row in two[:2]) == [(0,), (1,)]
    assert two[-1].passages == (0, 1)


def pooled(loaded, given, experts, no_context=(0.5, 0.5), all_passages=(0.6, 0.4), question=(0.0,) * 3, **parameters):
    """Pool three experts, whose first gave the answer so far probability .5, and an all-passages row sure of it.

    Returns the probabilities of both tokens, the weights of the experts, of the row without passages, of the
    all-passages row.
    """
    plan = plan_of(loaded, given, **parameters)
    order = [row.passages[0] for row in plan.rows[:3]]
    log_probs, weights = plan.combine(
        RowScores(
            log_probs=torch.tensor([*(experts[i] for i in order), no_context, all_passages]).log(),
            question=torch.tensor([*(question[i] for i in order), 9.0, 9.0]),
            answer=torch.tensor([*(math.log(0.5) if i == 0 else 0.0 for i in order), 9.0, 0.0]),
            confidence=torch.zeros(5),
        )
    )
    return log_probs.exp().tolist(), [float(weights[order.index(i)]) for i in range(3)] + weights[3:].tolist()


@pytest.mark.parametrize(
    ("weight", "weights", "first"),
    [
        # relevance .8, .4, .4: shares 1/2, 1/4, 1/4, times 1 - prior = .6: .3, .15, .15; the all-passages row .4. With
        # the
        # answer so far .15, .15, .15, .4, which sum to .85.
        # Token 0: (.15 * .9 + .15 * .1 + .15 * .1 + .4 * .6) / .85 = .405 / .85.
        (1.0, [0.15 / 0.85] * 3 + [0.0, 0.4 / 0.85], 0.405 / 0.85),
        # squared 4 : 1 : 1: .4, .1, .1; with the answer so far .2, .1, .1, .4, which sum to .8.
        # Token 0: (.2 * .9 + .1 * .1 + .1 * .1 + .4 * .6) / .8 = .44 / .8.
        (2.0, [0.25, 0.125, 0.125, 0.0, 0.5], 0.55),
        # without relevance .2 each; with the answer so far .1, .2, .2, .4, which sum to .9.
        # Token 0: (.1 * .9 + .2 * .1 + .2 * .1 + .4 * .6) / .9 = .37 / .9.
        (0.0, [1 / 9, 2 / 9, 2 / 9, 0.0, 4 / 9], 0.37 / 0.9),
        # 5 unless it is said: 32 : 1 : 1 of 34, times .6: 19.2, .6, .6 and 13.6 of the all-passages row; with the
        # answer so
        # far 9.6, .6, .6, 13.6, which sum to 24.4. Token 0: (9.6 * .9 + .6 * .1 + .6 * .1 + 13.6 * .6) / 24.4.
        (None, [9.6 / 24.4, 0.6 / 24.4, 0.6 / 24.4, 0.0, 13.6 / 24.4], 16.92 / 24.4),
    ],
)
def test_the_mixture_by_hand(loaded, weight, weights, first):
    experts = {0: (0.9, 0.1), 1: (0.1, 0.9), 2: (0.1, 0.9)}
    given = {} if weight is None else {"relevance_weight": weight}
    probs, found = pooled(loaded, (0.8, 0.4, 0.4), experts, prior=0.4, relevance="score", **given)
    assert probs == pytest.approx([first, 1 - first])
    assert found == pytest.approx(weights)


@pytest.mark.parametrize(
    ("relevance", "weights"),
    [
        # The question .1, .4, .2 and the given scores .8, .2, .4, weight 1; the all-passages row takes .5 of the
        # prior.
        # 1 : 4 : 2 are 1/7, 4/7, 2/7 of the other .5; with the answer so far .5 : 4 : 2 : 7.
        ("question", [0.5 / 13.5, 4 / 13.5, 2 / 13.5, 0.0, 7 / 13.5]),
        # 4 : 1 : 2; with the answer so far 2 : 1 : 2 : 7.
        ("score", [2 / 12, 1 / 12, 2 / 12, 0.0, 7 / 12]),
        # 4 : 4 : 4; with the answer so far .5 : 1 : 1 : 3.
        ("both", [0.5 / 5.5, 1 / 5.5, 1 / 5.5, 0.0, 3 / 5.5]),
    ],
)
def test_relevance_is_that_of_the_question_the_given_one_or_their_product(loaded, relevance, weights):
    experts = dict.fromkeys(range(3), (0.5, 0.5))
    question = [math.log(value) for value in (0.1, 0.4, 0.2)]
    _, found = pooled(loaded, (0.8, 0.2, 0.4), experts, question=question, relevance=relevance, relevance_weight=1.0)
    assert found == pytest.approx(weights)
    assert plan_of(loaded, (0.8, 0.2, 0.4), relevance=relevance).score_question == (relevance != "score")


def test_contrast_moves_every_member_away_from_the_row_without_passages(loaded):
    # contrast 1: p^2 / p_0 with p_0 = (.75, .25). The experts, all (.8, .2): .64 / .75 and .04 / .25; the all-passages
    # row:
    # .36 / .75 and .16 / .25. Prior .5 and equal relevance: 1/6 each and 1/2; with the answer so far the first is
    # halved: 1/12, 2/12, 2/12 and 6/12 of 11/12.
    experts = dict.fromkeys(range(3), (0.8, 0.2))
    probs, weights = pooled(loaded, (0.5,) * 3, experts, no_context=(0.75, 0.25), relevance="score", contrast=1.0)
    first, second = (5 * 0.64 + 6 * 0.36) / 0.75, (5 * 0.04 + 6 * 0.16) / 0.25
    assert probs == pytest.approx([first / (first + second), second / (first + second)])
    assert weights == pytest.approx([1 / 11, 2 / 11, 2 / 11, 0.0, 6 / 11])


def test_the_joint_row_reads_what_the_unmodified_model_reads(loaded):
    """With nearly all of the prior on the all-passages row, the answer is that of the sorted prompt."""
    layout = toy_layout((3, 4, 5), relevance=(0.5, 0.9, 0.1))
    engine = Engine(loaded, ToyEncoder(), "tiny", "print")
    choice = MitigationChoice("committee", {"prior": 1 - 1e-6, "relevance": "score"})
    found = engine.next_log_probs(layout, choice)
    plain = engine.next_log_probs(layout.select((2, 0, 1)))
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=0)


def test_joint_rows_come_last():
    with pytest.raises(PlanConflictError, match="all-passages rows must come last"):
        Plan(rows=(RowPlan(all_passages=True), RowPlan()), combine=lambda scores: (scores.log_probs[0], scores.answer))
    with pytest.raises(PlanConflictError, match="all-passages rows must come last"):
        Plan(rows=(RowPlan(all_passages=True),), independent_passages=True)


def test_the_experts_passages_come_from_the_store_and_the_joint_rows_prefix_too(loaded):
    layout = toy_layout((3, 4, 5), relevance=(0.5, 0.9, 0.1))
    engine = Engine(loaded, ToyEncoder(), "tiny", "print", passages=PassageStore([MemoryTier()]))
    committee = MitigationChoice("committee")
    cold = engine.open(layout, committee)
    assert cold.cached_tokens == 0
    warm = engine.open(layout, committee)
    assert warm.cached_tokens == layout.suffix.start
    torch.testing.assert_close(warm.next_log_probs(), cold.next_log_probs(), atol=1e-5, rtol=0)
