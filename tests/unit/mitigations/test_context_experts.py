"""The pooling rules of context_experts, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.errors import ConfigError
from rag_posfix.mitigations import create
from rag_posfix.plan.plan import RowScores
from tests.support.tiny import loaded_model, toy_layout


@pytest.fixture(scope="module")
def shape():
    return loaded_model().spec.shape


def pooled(shape, given, experts, no_context=(0.5, 0.5), answer=None, question=None, **parameters):
    """Pool two experts over a vocabulary of two tokens."""
    layout = toy_layout((3, 4), relevance=given)
    plan = create("context_experts", {"relevance": "score", **parameters}).plan(layout, shape)
    order = [row.passages[0] for row in plan.rows[:-1]]
    rows = torch.tensor([experts[i] for i in order] + [no_context]).log()
    zeros = [0.0, 0.0]
    scores = RowScores(
        log_probs=rows,
        question=torch.tensor([(question or zeros)[i] for i in order] + [0.0]),
        answer=torch.tensor([(answer or zeros)[i] for i in order] + [0.0]),
        confidence=rows.amax(dim=-1),
    )
    log_probs, weights = plan.combine(scores)
    return log_probs.exp().tolist(), {i: float(weights[place]) for place, i in enumerate(order)}


def test_the_mixture_weights_experts_by_relevance_to_the_power_of_its_weight(shape):
    # r = (0.8, 0.4), weight 1: shares 2/3 and 1/3. Token 0: 2/3 * 0.9 + 1/3 * 0.3 = 0.7.
    probs, shares = pooled(shape, (0.8, 0.4), [(0.9, 0.1), (0.3, 0.7)], relevance_weight=1.0)
    assert probs == pytest.approx([0.7, 0.3])
    assert shares == pytest.approx({0: 2 / 3, 1: 1 / 3})


@pytest.mark.parametrize(
    ("weight", "first", "share"),
    [
        (2.0, 0.78, 4 / 5),  # 4 : 1. Token 0: .8 * .9 + .2 * .3
        (0.0, 0.6, 1 / 2),  # .5 * .9 + .5 * .3
        (None, (32 * 0.9 + 0.3) / 33, 32 / 33),  # 5 unless it is said: 2^5 = 32 : 1
    ],
)
def test_the_relevance_weight_is_the_power_of_the_relevance(shape, weight, first, share):
    given = {} if weight is None else {"relevance_weight": weight}
    probs, shares = pooled(shape, (0.8, 0.4), [(0.9, 0.1), (0.3, 0.7)], **given)
    assert probs == pytest.approx([first, 1 - first])
    assert shares == pytest.approx({0: share, 1: 1 - share})


def test_the_relevance_weight_counts_in_the_maximum_too(shape):
    # weight 1, 2 : 1. Token 0: max(2 * .5, .2) = 1; token 1: max(2 * .5, .8) = 1. Weight 0, 1 : 1: .5 and .8.
    experts = [(0.5, 0.5), (0.2, 0.8)]
    probs, shares = pooled(shape, (0.8, 0.4), experts, relevance_weight=1.0, pool="max", answer_weight=0.0)
    assert probs == pytest.approx([0.5, 0.5])
    assert shares == {0: 1.0, 1: 0.0}
    probs, shares = pooled(shape, (0.8, 0.4), experts, relevance_weight=0.0, pool="max", answer_weight=0.0)
    assert probs == pytest.approx([0.5 / 1.3, 0.8 / 1.3])
    assert shares == {0: 0.0, 1: 1.0}


def test_holding_makes_the_share_the_posterior_of_the_answer_so_far(shape):
    # Equal relevance; expert 0 gave the answer so far probability 0.6, expert 1 0.2: posterior 3/4 and 1/4.
    probs, shares = pooled(
        shape, (0.5, 0.5), [(0.8, 0.2), (0.4, 0.6)], answer=[math.log(0.6), math.log(0.2)], answer_weight=1.0
    )
    assert shares == pytest.approx({0: 0.75, 1: 0.25})
    assert probs == pytest.approx([0.75 * 0.8 + 0.25 * 0.4, 0.75 * 0.2 + 0.25 * 0.6])


def test_without_holding_the_answer_so_far_does_not_count(shape):
    _, shares = pooled(
        shape, (0.5, 0.5), [(0.8, 0.2), (0.4, 0.6)], answer=[math.log(0.6), math.log(0.2)], answer_weight=0.0
    )
    assert shares == pytest.approx({0: 0.5, 1: 0.5})


def test_max_takes_the_best_expert_at_each_token_as_the_paper_does(shape):
    # weight 1: scores 0: max(0.9 * 0.8, 0.2 * 0.4) = 0.72; 1: max(0.1 * 0.8, 0.8 * 0.4) = 0.32; normalised by 1.04.
    probs, shares = pooled(
        shape, (0.8, 0.4), [(0.9, 0.1), (0.2, 0.8)], relevance_weight=1.0, pool="max", answer_weight=0.0
    )
    assert probs == pytest.approx([0.72 / 1.04, 0.32 / 1.04])
    assert shares == {0: 1.0, 1: 0.0}


def test_contrast_counts_in_the_maximum_too(shape):
    # contrast 1: p^2 / p_0. Expert 0: .64 / .5 and .04 / .5; expert 1: .16 / .5 and .36 / .5. Maxima 1.28 and .72.
    experts = [(0.8, 0.2), (0.4, 0.6)]
    probs, shares = pooled(shape, (0.5, 0.5), experts, contrast=1.0, pool="max", answer_weight=0.0)
    assert probs == pytest.approx([0.64, 0.36])
    assert shares == {0: 1.0, 1: 0.0}


def test_a_relevance_of_0_is_lifted_to_a_hundredth(shape):
    _, shares = pooled(shape, (1.0, 0.0), [(0.5, 0.5), (0.5, 0.5)], relevance_weight=1.0)
    assert shares == pytest.approx({0: 1 / 1.01, 1: 0.01 / 1.01})


@pytest.mark.parametrize("relevance", ["question", "score", "both"])
def test_the_question_is_scored_where_its_likelihood_counts(shape, relevance):
    plan = create("context_experts", {"relevance": relevance}).plan(toy_layout((3, 4)), shape)
    assert plan.score_question == (relevance != "score")


def test_contrast_moves_away_from_the_row_without_passages(shape):
    # One half more of the expert, one half less of the no_context: 0.8^1.5 / 0.5^0.5 against 0.2^1.5 / 0.5^0.5.
    probs, _ = pooled(shape, (0.5, 0.5), [(0.8, 0.2), (0.8, 0.2)], contrast=0.5)
    assert probs == pytest.approx([0.8**1.5 / (0.8**1.5 + 0.2**1.5), 0.2**1.5 / (0.8**1.5 + 0.2**1.5)])
    # contrast 1 and an no_context of (.75, .25): .64 / .75 against .04 / .25, 16 : 3.
    probs, _ = pooled(shape, (0.5, 0.5), [(0.8, 0.2), (0.8, 0.2)], no_context=(0.75, 0.25), contrast=1.0)
    assert probs == pytest.approx([16 / 19, 3 / 19])


def test_contrast_can_be_the_divergence_of_each_expert_from_the_row_without_passages(shape):
    # Expert 0 says (1, 0), the no_context (1/2, 1/2): their middle is (3/4, 1/4).
    # JSD = (log2(1 / (3/4)) + 1/2 log2((1/2) / (3/4)) + 1/2 log2((1/2) / (1/4))) / 2
    #     = (0.4150 - 0.2925 + 0.5) / 2 = 0.3113 bits.
    # Expert 1 says what the no_context says: divergence 0, so it stays as it is.
    # Token 0: 1/2 * 1^1.3113 / 0.5^0.3113 + 1/2 * 0.5; token 1: 0 + 1/2 * 0.5.
    first = 0.5 * 0.5**-0.311278 + 0.25
    probs, _ = pooled(shape, (0.5, 0.5), [(1.0, 1e-30), (0.5, 0.5)], contrast="divergence", relevance_weight=0.0)
    assert probs == pytest.approx([first / (first + 0.25), 0.25 / (first + 0.25)], abs=1e-5)


def test_the_fingerprint_tells_the_kinds_of_contrast_apart():
    prints = {create("context_experts", {"contrast": c}).fingerprint() for c in (0.0, 0.3, "divergence")}
    assert len(prints) == 3


def test_relevance_can_be_the_likelihood_of_the_question(shape):
    # exp of the mean log-probability: 0.6 and 0.3, weight 1: shares 2/3 and 1/3, whatever the given scores say.
    _, shares = pooled(
        shape, (0.1, 0.9), [(0.9, 0.1), (0.3, 0.7)],
        question=[math.log(0.6), math.log(0.3)], relevance="question", relevance_weight=1.0,
    )  # fmt: skip
    assert shares == pytest.approx({0: 2 / 3, 1: 1 / 3})


def test_relevance_can_be_both_multiplied(shape):
    # Question 0.6 : 0.3, given 0.2 : 0.8, weight 1: 0.12 : 0.24.
    _, shares = pooled(
        shape, (0.2, 0.8), [(0.9, 0.1), (0.3, 0.7)],
        question=[math.log(0.6), math.log(0.3)], relevance="both", relevance_weight=1.0,
    )  # fmt: skip
    assert shares == pytest.approx({0: 1 / 3, 1: 2 / 3})


def test_there_is_one_expert_per_passage_and_one_row_without_passages(shape):
    plan = create("context_experts").plan(toy_layout((3, 4, 5)), shape)
    assert sorted(row.passages for row in plan.rows) == [(), (0,), (1,), (2,)]
    assert plan.rows[-1].passages == ()
    assert plan.independent_passages


def test_experts_keeps_the_most_relevant(shape):
    plan = create("context_experts", {"experts": 2}).plan(toy_layout((3, 4, 5), relevance=(0.2, 0.9, 0.5)), shape)
    assert sorted(row.passages for row in plan.rows) == [(), (1,), (2,)]


def test_experts_without_relevance_says_what_to_do(shape):
    with pytest.raises(ConfigError, match=r"experts=2 keeps the most relevant of 3 passages, .* rerank them"):
        create("context_experts", {"experts": 2}).plan(toy_layout((3, 4, 5)), shape)
    for count in (3, 4):  # nothing has to be left out
        assert len(create("context_experts", {"experts": count}).plan(toy_layout((3, 4, 5)), shape).rows) == 4


def test_the_contrast_raises_no_token_that_the_expert_finds_implausible(shape):
    # Expert (.95, .05), without passages (.99, .01), contrast 1: p^2 / p_0 = .9116 and .25; the second token, below a
    # tenth of .95, keeps .05 with plausible=.1, and rises with plausible=.01.
    probs, _ = pooled(shape, (0.5, 0.5), [(0.95, 0.05)] * 2, (0.99, 0.01), contrast=1.0, plausible=0.1)
    assert probs == pytest.approx([0.911616 / 0.961616, 0.05 / 0.961616], abs=1e-5)
    probs, _ = pooled(shape, (0.5, 0.5), [(0.95, 0.05)] * 2, (0.99, 0.01), contrast=1.0, plausible=0.01)
    assert probs == pytest.approx([0.911616 / 1.161616, 0.25 / 1.161616], abs=1e-5)


@pytest.mark.parametrize(("until", "tracked", "first"), [("sentence", True, 0.8), ("answer", False, 16 / 17)])
def test_the_contrast_ends_with_the_first_sentence(shape, until, tracked, first):
    plan = create("context_experts", {"contrast": 1.0, "contrast_until": until}).plan(toy_layout((3, 4)), shape)
    rows = torch.tensor([(0.8, 0.2), (0.8, 0.2), (0.5, 0.5)]).log()
    scores = RowScores(rows, torch.zeros(3), torch.zeros(3), rows.amax(dim=-1), None, first_sentence=False)
    assert plan.tracks_sentence == tracked
    assert plan.combine(scores)[0].exp().tolist() == pytest.approx([first, 1 - first])
