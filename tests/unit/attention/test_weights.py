"""Observed attention with soft caps and sinks, by numbers worked by hand and by its definition."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.attention.masks import causal_rows, head_attention, last_query_attention


def states(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_sink_takes_its_share_and_adds_nothing():
    query, key = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, 2)
    # Scores 0, 0 and the sink 0: three shares of 1/3. A sink of log 2 takes 2 of 4 shares.
    for sink, share in ((0.0, 1 / 3), (math.log(2), 0.25)):
        weights = last_query_attention(query, key, None, 1.0, sinks=torch.tensor([sink]))
        assert weights[0].tolist() == pytest.approx([share, share])


def test_a_soft_cap_bends_scores():
    query, key = torch.tensor([[[[4.0]]]]), torch.tensor([[[[1.0], [0.0]]]])
    # Score 4 under the cap 2: 2 tanh 2 = 1.92806; p = e^1.92806 / (e^1.92806 + 1) = 0.87303.
    expected = [0.87303, 0.12697]
    assert last_query_attention(query, key, None, 1.0, 2.0)[0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("n_query", [1, 5, 70, 130])
@pytest.mark.parametrize("masked", [None, "bool", "additive"])
def test_blocks_are_the_definition(n_query, masked):
    n_key, sinks = 130, states(4, seed=3)
    query, key = states(2, 4, n_query, 8), states(2, 2, n_key, 8, seed=1)
    visible = torch.ones(n_query, n_key, dtype=torch.bool).tril(n_key - n_query)
    if masked:
        visible &= (torch.arange(n_key) % 3 != 1) | (torch.arange(n_key) < 2)
    given = None if masked is None else visible[None, None].expand(2, 1, -1, -1)
    if masked == "additive":
        given = torch.zeros(2, 1, n_query, n_key).masked_fill(~given, torch.finfo(torch.float32).min)
    logits = 3 * torch.tanh(query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.7 / 3)
    logits = torch.cat((logits.masked_fill(~visible, -1e30), sinks[None, :, None, None].expand(2, 4, n_query, 1)), -1)
    weights = logits.softmax(-1)[..., :-1]
    by_head = head_attention(query, key, given, 0.7, (2, 1), 3.0, sinks=sinks)
    assert torch.allclose(by_head, weights[:, [2, 1], -1], atol=1e-6)
    averaged = last_query_attention(query, key, given, 0.7, 3.0, count=n_query, sinks=sinks)
    assert torch.allclose(averaged, weights.mean(dim=(1, 2)), atol=1e-6)


def test_padding_and_later_tokens_are_hidden():
    # Tokens 1..3 are the queries; the second row begins at token 2.
    rows = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert causal_rows((0, 2), 3, 4)[:, 0].int().tolist() == [list(row) for row in rows]
