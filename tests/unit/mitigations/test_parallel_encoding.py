"""APE: two groups by hand, and the reductions."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.attention.masks import attend_with_lse
from rag_posfix.mitigations import create
from rag_posfix.mitigations.parallel_encoding import TwoGroupAttention
from tests.support.attending import random_states, rotate, run
from tests.support.tiny import loaded_model, toy_layout

POSITIONS = torch.arange(9).float()[None]


def by_hand(temperature, scale):
    """One head, D = 1: a prefix key, two passage keys, the question's own key. Returns output and attention."""
    scores = [math.log(2.0), math.log(4.0), math.log(1.0), math.log(3.0)]
    key = torch.tensor(scores).view(1, 1, 4, 1)
    value = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1)
    attend = TwoGroupAttention(1, 3, temperature, scale)
    from rag_posfix.plan.plan import AttentionInput

    query = torch.ones(1, 1, 1, 1)
    given = AttentionInput(query, key, value, torch.zeros(1, 4), 1.0, 0, rotate, lambda: query)
    out, newest = attend(given)
    return float(out), newest[0].tolist()


def test_with_temperature_and_scale_one_it_is_ordinary_attention():
    # Shares 2, 4, 1, 3 of 10: .2 + .8 + .3 + 1.2 = 2.5.
    out, newest = by_hand(1.0, 1.0)
    assert out == pytest.approx(2.5)
    assert newest == pytest.approx([0.2, 0.4, 0.1, 0.3])


def test_a_temperature_of_one_half_squares_the_passages_weights():
    # Passages 4^2 = 16 and 1: mass 17; others 2 + 3 = 5. o_C = (16*2 + 3)/17, o_O = (2*1 + 3*4)/5; 17/22, 5/22.
    out, newest = by_hand(0.5, 1.0)
    assert out == pytest.approx((35 + 14) / 22)
    assert newest == pytest.approx([2 / 22, 16 / 22, 1 / 22, 3 / 22])


def test_a_scale_of_one_half_takes_the_root_of_the_passages_mass():
    # Mass 4 + 1 = 5 becomes sqrt(5); others 5. Within the passages the shares stay 4/5 and 1/5.
    root = math.sqrt(5.0)
    out, newest = by_hand(1.0, 0.5)
    assert newest == pytest.approx([2 / (5 + root), 0.8 * root / (5 + root), 0.2 * root / (5 + root), 3 / (5 + root)])
    assert out == pytest.approx((root * (0.8 * 2 + 0.2 * 3) + 14) / (5 + root))


@pytest.mark.parametrize("start", [6, 7, 8])
def test_neutral_it_is_causal_attention_over_groups_of_any_size(start):
    query, key, value = random_states(9)
    out, newest = run(TwoGroupAttention(2, 6, 1.0, 1.0), query, key, value, POSITIONS, start)
    at = rotate(query, POSITIONS), rotate(key, POSITIONS)
    whole, _ = attend_with_lse(*at, value, 8**-0.5, causal=True)
    assert torch.allclose(out, whole[0, :, start:], atol=1e-5)
    assert float(newest.sum()) == pytest.approx(1.0, abs=1e-5)


def test_several_tokens_at_once_are_one_after_another():
    query, key, value = random_states(9)
    attend = TwoGroupAttention(2, 5, 0.8, 0.9)
    together, _ = run(attend, query, key, value, POSITIONS, 6)
    for i in range(3):
        n = 7 + i
        alone, _ = run(attend, *(states[:, :, :n] for states in (query, key, value)), POSITIONS[:, :n], n - 1)
        assert torch.allclose(together[:, i], alone[:, 0], atol=1e-5)


def test_passages_share_their_start():
    plan = create("parallel_encoding").plan(toy_layout((2, 3), prefix=1, suffix=2), loaded_model().spec.shape)
    starts = plan.rows[0].positions[0].tolist()
    assert starts.count(1.0) == 2
    assert starts[-2:] == [4.0, 5.0]
