"""The choice between the passages' answers, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.mitigations import create
from rag_posfix.plan.plan import CandidateAnswers, RowScores
from tests.support.tiny import loaded_model, toy_layout

# [d][k]: how likely row k finds the answer that row d wrote; the last row reads no passage.
# Answer 0 is likely in row 0 only; answer 1 is likely everywhere.
SAID = ((0.6, 0.1, 0.1), (0.4, 0.8, 0.4), (0.3, 0.3, 0.9))


@pytest.fixture(scope="module")
def shape():
    return loaded_model().spec.shape


def chosen(shape, said=SAID, given=None, question=None, same=(), tokens=None, **parameters):
    """Return the weights of the passages and of the row without any."""
    count = len(said) - 1
    layout = toy_layout((3, 4, 5)[:count], relevance=given)
    parameters = {"pool": "mixture", "relevance_weight": 1.0, **parameters}
    plan = create("passage_answers", parameters).plan(layout, shape)
    order = [row.passages[0] for row in plan.rows[:-1]] + [count]
    alike = torch.eye(count + 1, dtype=torch.bool)
    for a, b in same:
        alike[a, b] = alike[b, a] = True
    drafts = CandidateAnswers(
        tokens=tuple((tokens or [(5,)] * (count + 1))[i] for i in order),
        log_probs=torch.tensor(said).log()[order][:, order],
        same=alike[order][:, order],
        question=torch.tensor([*(question or [0.0] * count), 0.0])[order],
    )
    weights = plan.draft.choose(drafts)
    return [float(weights[order.index(i)]) for i in range(count + 1)]


def test_an_answer_that_only_its_passage_would_give_counts_more(shape):
    # Shares: answer 0: 0.6 / (0.6 + 0.1 + 0.1) = 3/4; answer 1: 0.8 / (0.4 + 0.8 + 0.4) = 1/2. Weights 3/5 and 2/5.
    assert chosen(shape) == pytest.approx([0.6, 0.4, 0.0])


def test_the_weight_of_the_share_is_its_power_and_0_leaves_it_out(shape):
    # (3/4)^2 : (1/2)^2 = 9 : 4.
    assert chosen(shape, share_weight=2.0) == pytest.approx([9 / 13, 4 / 13, 0.0])
    assert chosen(shape, share_weight=0.0) == pytest.approx([0.5, 0.5, 0.0])


def test_relevance_is_that_of_the_question_times_the_given_one(shape):
    parameters = {"share_weight": 0.0, "question": [math.log(0.2), math.log(0.6)], "given": (0.9, 0.6)}
    # Question 0.2 : 0.6 = 1 : 3; given 0.9 : 0.6 = 3 : 2; both 3 : 6.
    assert chosen(shape, relevance="question", **parameters) == pytest.approx([1 / 4, 3 / 4, 0.0])
    assert chosen(shape, relevance="score", **parameters) == pytest.approx([3 / 5, 2 / 5, 0.0])
    assert chosen(shape, relevance="both", **parameters) == pytest.approx([1 / 3, 2 / 3, 0.0])
    # Weight 2 on both: 9 : 36.
    assert chosen(shape, relevance_weight=2.0, **parameters) == pytest.approx([1 / 5, 4 / 5, 0.0])


def test_without_given_relevance_both_is_that_of_the_question(shape):
    question = [math.log(0.2), math.log(0.6)]
    assert chosen(shape, question=question) == pytest.approx(chosen(shape, question=question, relevance="question"))


def test_a_relevance_of_0_is_lifted_to_a_floor(shape):
    # 1 : 0.01.
    assert chosen(shape, given=(1.0, 0.0), share_weight=0.0) == pytest.approx([1 / 1.01, 0.01 / 1.01, 0.0])


def test_chosen_lets_the_best_passage_answer_alone(shape):
    assert chosen(shape, pool="chosen") == [1.0, 0.0, 0.0]
    assert chosen(shape, pool="chosen", given=(0.2, 0.8)) == [0.0, 1.0, 0.0]


def test_equal_answers_add_their_weights(shape):
    # Relevance 0.4, 0.3, 0.3: alone passage 0 is best; 1 and 2 wrote the same and weigh 0.6 together. 2 speaks: its
    # share of the answer is larger (0.5 of 1.0 against 0.4 of 1.0 in row 1).
    said = ((0.5, 0.2, 0.2, 0.1), (0.1, 0.4, 0.4, 0.1), (0.1, 0.3, 0.5, 0.1), (0.25,) * 4)
    given = (0.4, 0.3, 0.3)
    assert chosen(shape, said, given, pool="chosen") == [1.0, 0.0, 0.0, 0.0]
    assert chosen(shape, said, given, same=[(1, 2)], pool="chosen") == [0.0, 0.0, 1.0, 0.0]


def test_saying_nothing_is_no_answer_unless_nothing_is_said_at_all(shape):
    certain = ((1.0, 1.0, 1.0), *SAID[1:])
    assert chosen(shape, certain, tokens=[(), (5,), (5,)]) == [0.0, 1.0, 0.0]
    silent = ((1.0, 1.0, 1.0),) * 3
    assert chosen(shape, silent, tokens=[(), (), ()]) == pytest.approx([0.5, 0.5, 0.0])


def test_the_mixture_is_the_posterior_that_starts_from_the_weights(shape):
    plan = create("passage_answers").plan(toy_layout((3, 4)), shape)
    log_probs = torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.5, 0.5]]).log()
    # Weights 0.6 : 0.4, the answer so far 0.2 : 0.6: posterior 0.12 : 0.24 = 1/3 : 2/3.
    # Token 0: 0.8 / 3 + 2 * 0.4 / 3.
    scores = RowScores(
        log_probs=log_probs, question=torch.zeros(3), confidence=torch.zeros(3),
        answer=torch.tensor([0.2, 0.6, 0.9]).log(), weights=torch.tensor([0.6, 0.4, 0.0]),
    )  # fmt: skip
    pooled, weights = plan.combine(scores)
    assert weights.tolist() == pytest.approx([1 / 3, 2 / 3, 0.0])
    assert pooled.exp().tolist() == pytest.approx([1.6 / 3, 1.4 / 3])


def test_there_is_one_row_per_passage_and_one_without_passages(shape):
    plan = create("passage_answers").plan(toy_layout((3, 4, 5)), shape)
    assert sorted(row.passages for row in plan.rows) == [(), (0,), (1,), (2,)]
    assert plan.rows[-1].passages == ()
    assert plan.independent_passages
    assert plan.draft.max_tokens == 24
    for relevance in ("question", "score", "both"):
        other = create("passage_answers", {"answer_tokens": 7, "relevance": relevance}).plan(toy_layout((3, 4)), shape)
        assert other.draft.max_tokens == 7
        assert other.score_question == (relevance != "score")
