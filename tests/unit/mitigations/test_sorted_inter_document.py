"""RoToR: the arrangement by hand, the fast path against explicit distances, routing."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rag_posfix.attention import masks
from rag_posfix.errors import ConfigError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from rag_posfix.mitigations.sorted_inter_document import CircularAttention
from rag_posfix.plan.plan import RowScores
from tests.support.attending import Rotation, random_states, reference, run, use_products
from tests.support.tiny import loaded_model, toy_layout


def arrangement(layout):
    """Return (distance (T, T), visible (T, T)) straight from the paper: one list of key positions per passage."""
    n = len(layout.token_ids)
    own = torch.arange(n).float()
    distance = own[:, None] - own[None, :]
    visible = distance >= 0
    first, spans = len(layout.prefix), layout.passages
    for i, span in enumerate(spans):
        positions, at = torch.arange(first).float().tolist(), first
        where = {}
        for j in (*range(i + 1, len(spans)), *range(i), i):  # i+1, .., k, 1, .., i-1, i
            where[j] = at
            at += len(spans[j])
        keys = torch.zeros(n)
        keys[:first] = torch.tensor(positions)
        for j, start in where.items():
            keys[spans[j].slice] = start + torch.arange(len(spans[j])).float()
        rows = span.slice
        distance[rows] = keys[rows][:, None] - keys[None, :]
        visible[rows] = False
        visible[rows, : layout.suffix.start] = distance[rows, : layout.suffix.start] >= 0
    return distance, visible


def test_the_arrangement_of_three_passages_by_hand():
    # P | A A | B | C S: tokens 0 | 1 2 | 3 | 4 | 5. For B the order is C, A, B: C at 1, A at 2 3, B at 4.
    distance, visible = arrangement(toy_layout((2, 1, 1), prefix=1, suffix=1))
    assert distance[3, :5].tolist() == [4.0, 2.0, 1.0, 0.0, 3.0]
    assert visible[3].tolist() == [True, True, True, True, True, False]
    # The first token of A: B at 1, C at 2, A at 3 4: it sees both fully and itself, not its second token.
    assert distance[1, :5].tolist() == [3.0, 0.0, -1.0, 2.0, 1.0]
    assert visible[1].tolist() == [True, True, False, True, True, False]


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("prefix", [0, 3])
@torch.inference_mode()
def test_in_bfloat16_it_is_the_paper_spelled_out(prefix, products, monkeypatch):
    if products:
        use_products(monkeypatch)
        monkeypatch.setattr(masks, "QUERY_BLOCK", 4)
    layout = toy_layout((4, 2, 5), prefix=prefix, suffix=3)
    query, key, value = (part.bfloat16() for part in random_states(len(layout.token_ids)))
    positions = torch.arange(len(layout.token_ids)).float()[None]
    out, _ = run(CircularAttention(layout), query, key, value, positions, rotate=BFloat16Rotation())
    expected = reference(query.float(), key.float(), value.float(), *arrangement(layout))
    assert (out.float() - expected).square().mean().sqrt() < 0.03 * expected.square().mean().sqrt()


class BFloat16Rotation(Rotation):
    """Rotates as a model in bfloat16 does."""

    def __call__(self, states, positions):
        return super().__call__(states.float(), positions).to(states.dtype)


@pytest.mark.parametrize("scale", [1.0, 1.37])  # YaRN scales what it rotates, once
@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("lengths", [(4, 2, 5), (1, 1), (3, 1, 1, 6)])
def test_the_fast_path_is_the_paper_spelled_out(prefix, lengths, scale):
    layout = toy_layout(lengths, prefix=prefix, suffix=3)
    states = random_states(len(layout.token_ids))
    positions = torch.arange(len(layout.token_ids)).float()[None]
    attend = CircularAttention(layout)
    distance, visible = arrangement(layout)
    out, _ = run(attend, *states, positions, rotate=Rotation(scale))
    assert torch.allclose(out, reference(*states, distance, visible, scale), atol=1e-5)
    assert torch.equal(attend.visible(len(layout.token_ids)), visible)


def test_the_smallest_passage_stands_nearest_to_the_question():
    layout = toy_layout((7, 4, 9, 6))
    order = create("sorted_inter_document").plan(layout, loaded_model().spec.shape).rows[0].passages
    tokens = [layout.tokens(layout.passages[i]) for i in order]
    assert tokens == sorted(tokens, reverse=True)


def test_the_most_relevant_passage_stands_nearest_to_the_question():
    layout = toy_layout(relevance=(0.9, 0.2, 0.4, 0.3))
    method = create("sorted_inter_document", {"sort": "relevance"})
    assert method.plan(layout, loaded_model().spec.shape).rows[0].passages == (1, 3, 2, 0)
    with pytest.raises(ConfigError, match="needs passages that carry relevance; rerank them first"):
        method.plan(toy_layout(), loaded_model().spec.shape)


def test_two_passages_are_arranged_and_one_is_not():
    shape = loaded_model().spec.shape
    assert create("sorted_inter_document").plan(toy_layout((6, 3)), shape).rows[0].attend is not None
    assert create("sorted_inter_document").plan(toy_layout((6,)), shape).rows[0].attend is None


def test_question_and_answer_read_an_ordinary_prompt_with_sorted_passages():
    loaded, layout = loaded_model(), toy_layout()
    plan = create("sorted_inter_document").plan(layout, loaded.spec.shape)
    running = Session(loaded, layout, plan)
    running.advance(5)
    assert running.can_share_pass, "decoding runs the stock path"


@pytest.mark.parametrize(("original", "speaker"), [(0.31, 0), (0.29, 1)])
def test_the_unmodified_row_speaks_if_it_is_nearly_as_confident(original, speaker):
    # routing .2: .31 + .2 > .5, and .29 + .2 < .5.
    plan = create("sorted_inter_document", {"routing": 0.2}).plan(toy_layout(), loaded_model().spec.shape)
    rows = torch.tensor([[0.6, 0.4], [0.5, 0.5]]).log()
    scores = RowScores(rows, torch.zeros(2), torch.zeros(2), torch.tensor([original, 0.5]).log())
    log_probs, weights = plan.combine(scores)
    assert torch.equal(log_probs, rows[speaker])
    assert weights.argmax() == speaker
    assert math.isclose(float(weights.sum()), 1.0)


def test_equally_confident_rows_and_a_routing_of_zero_leave_the_sorted_row():
    for routing, original, row in ((0.0, 0.5, 1), (0.25, 0.25, 1), (0.25, 0.26, 0), (1.0, 0.01, 0)):
        plan = create("sorted_inter_document", {"routing": routing}).plan(toy_layout(), loaded_model().spec.shape)
        zeros, confidence = torch.zeros(2), torch.tensor([original, 0.5])
        _, weights = plan.combine(RowScores(torch.zeros(2, 2), zeros, zeros, confidence.log()))
        assert weights.tolist() == [1.0 - row, float(row)]


def test_the_confidence_is_that_of_the_likeliest_first_token_for_the_whole_answer():
    loaded, layout, seen = loaded_model(), toy_layout(), []
    plan = create("sorted_inter_document", {"routing": 0.2}).plan(layout, loaded.spec.shape)

    def combine(scores):
        seen.append(scores)
        return plan.combine(scores)

    running = Session(loaded, layout, dataclasses.replace(plan, combine=combine))
    for token in (5, 9):
        running.next_log_probs()
        running.advance(token)
    first = seen[0].log_probs.max(dim=-1).values
    assert all(torch.equal(scores.confidence, first) for scores in seen)
    assert not torch.equal(seen[-1].log_probs.max(dim=-1).values, first)


def test_routing_brings_the_order_back():
    assert create("sorted_inter_document").is_order_invariant
    assert not create("sorted_inter_document", {"routing": 0.2}).is_order_invariant
