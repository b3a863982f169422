"""The pooling rule of the committee, worked by hand, and its joint row."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.caching.kv.memory import MemoryPassages
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError, PlanConflictError
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
    assert [row.joint for row in last] == [None] * 4 + [True]
    assert last[-1].passages == (2, 0, 1)
    assert plan_of(loaded, (0.5, 0.9, 0.1), joint_order="best_first").rows[-1].passages == (1, 0, 2)
    two = plan_of(loaded, (0.5, 0.9, 0.1), experts=2).rows
    assert sorted(row.passages for row in two[:2]) == [(0,), (1,)]
    assert two[-1].passages == (0, 1)


def test_the_mixture_by_hand(loaded):
    # relevance (.8, .4, .4), weight 1: shares 1/2, 1/4, 1/4, times 1 - prior = .6: .3, .15, .15; the joint row .4.
    # The answer so far: probability .5 under the first expert, 1 under the others and the joint row:
    # .15, .15, .15, .4, which sum to .85. Token 0: (.15 * .9 + .15 * .1 + .15 * .1 + .4 * .6) / .85 = .405 / .85.
    plan = plan_of(loaded, (0.8, 0.4, 0.4), prior=0.4, relevance="given", relevance_weight=1.0)
    order = [row.passages[0] for row in plan.rows[:3]]
    experts = {0: (0.9, 0.1), 1: (0.1, 0.9), 2: (0.1, 0.9)}
    log_probs, weights = plan.combine(
        RowScores(
            log_probs=torch.tensor([*(experts[i] for i in order), (0.5, 0.5), (0.6, 0.4)]).log(),
            question=torch.zeros(5),
            answer=torch.tensor([*(math.log(0.5) if i == 0 else 0.0 for i in order), 0.0, 0.0]),
            confidence=torch.zeros(5),
        )
    )
    assert log_probs.exp().tolist() == pytest.approx([0.405 / 0.85, 0.445 / 0.85])
    assert weights.tolist() == pytest.approx([0.15 / 0.85] * 3 + [0.0, 0.4 / 0.85])


def test_the_joint_row_reads_what_the_unmodified_model_reads(loaded):
    """With nearly all of the prior on the joint row, the answer is that of the sorted prompt."""
    layout = toy_layout((3, 4, 5), relevance=(0.5, 0.9, 0.1))
    engine = Engine(loaded, ToyEncoder(), "tiny", "print")
    joint = MitigationChoice("committee", {"prior": 1 - 1e-6, "relevance": "given"})
    found = engine.next_log_probs(layout, joint)
    plain = engine.next_log_probs(layout.select((2, 0, 1)))
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=0)


def test_joint_rows_come_last():
    with pytest.raises(PlanConflictError, match="joint rows must come last"):
        Plan(rows=(RowPlan(joint=True), RowPlan()), combine=lambda scores: (scores.log_probs[0], scores.answer))
    with pytest.raises(PlanConflictError, match="joint rows must come last"):
        Plan(rows=(RowPlan(joint=True),), independent_passages=True)


def test_a_prior_of_one_row_alone_is_refused():
    for prior in (0.0, 1.0):
        with pytest.raises(ConfigError, match="prior"):
            create("committee", {"prior": prior})


def test_the_experts_passages_come_from_the_store_and_the_joint_rows_prefix_too(loaded):
    layout = toy_layout((3, 4, 5), relevance=(0.5, 0.9, 0.1))
    engine = Engine(loaded, ToyEncoder(), "tiny", "print", passages=PassageStore([MemoryPassages()]))
    committee = MitigationChoice("committee")
    cold = engine.open(layout, committee)
    assert cold.cached_tokens == 0
    warm = engine.open(layout, committee)
    assert warm.cached_tokens == layout.suffix.start
    torch.testing.assert_close(warm.next_log_probs(), cold.next_log_probs(), atol=1e-5, rtol=0)
