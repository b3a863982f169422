"""Attention by segments of keys, against the plain one."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.attention import masks
from rag_posfix.attention.masks import (
    attend_prompt_with_lse,
    attend_segments,
    attend_whole,
    attend_with_lse,
    merge,
)
from rag_posfix.attention.rope import rotate_half_split
from tests.support.attending import (
    FREQUENCIES,
    HEADS,
    KV_HEADS,
    SIZE,
    random_states,
    reference_attention,
    reference_scores,
    rotate,
    use_products,
)


def spelled_out(query, key, causal):
    scores = query.float() @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).float().transpose(-1, -2)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("n_key", "n_query", "causal"),
    [(9, 9, False), (9, 9, True), (9, 4, True), (9, 1, True), (9, 4, False)]
    # Queries that are folded without a mask, and are not with one.
    + [(40, masks.FOLD_FROM, causal) for causal in (False, True)] + [(40, 40, True)],
)  # fmt: skip
def test_it_is_softmax_attention_and_its_log_sum_exp_for_grouped_heads(fused, n_key, n_query, causal, monkeypatch):
    if not fused:
        monkeypatch.setattr(masks, "QUERY_BLOCK", 3)
        monkeypatch.delitem(masks.LSE_KERNELS, "cpu")
    query, key, value = random_states(n_key)
    query = query[:, :, n_key - n_query :]
    out, lse = attend_with_lse(query, key, value, 1.0, causal=causal)
    scores = spelled_out(query, key, causal)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-5)
    assert torch.allclose(out, scores.softmax(-1) @ value.repeat_interleave(HEADS // KV_HEADS, 1), atol=1e-5)


@pytest.fixture
def products(monkeypatch):
    use_products(monkeypatch)


def bfloat16_states(size=64, n_query=48, n_key=200, scale=3.0):
    torch.manual_seed(11)
    query = torch.randn(2, 6, n_query, size) * scale
    return query.bfloat16(), torch.randn(2, 2, n_key, size).bfloat16(), torch.randn(2, 2, n_key, size).bfloat16()


def exact(query, key, value, scaling):
    scores = query.double() @ key.repeat_interleave(3, 1).double().transpose(-1, -2) * scaling
    return scores.softmax(-1) @ value.repeat_interleave(3, 1).double(), scores.logsumexp(-1)


def error(out, expected):
    return float((out - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("most", [2**21, 1000])  # all rows in one product; five at a time
@torch.inference_mode()
def test_products_round_less_than_scores_in_bfloat16_do(most, products, monkeypatch):
    monkeypatch.setattr(masks, "MAX_SCORES", most)
    query, key, value = bfloat16_states()
    expected, lse = exact(query, key, value, 0.125)
    out, found = attend_whole(query, key, value, 0.125)
    fused = attend_with_lse(query, key, value, 0.125)[0]
    rounded = (query @ key.repeat_interleave(3, 1).transpose(-1, -2) * 0.125).float().softmax(-1).bfloat16()
    assert out.dtype == torch.bfloat16
    assert (found - lse).abs().max() < 0.03
    assert (
        error(fused, expected) < error(out, expected) < 0.5 * error(rounded @ value.repeat_interleave(3, 1), expected)
    )


@torch.inference_mode()
def test_blocks_of_a_prompt_are_causal_attention(products, monkeypatch):
    monkeypatch.setattr(masks, "QUERY_BLOCK", 20)  # two whole blocks and one of eight
    query, key, value = (states[:, :, :48] for states in bfloat16_states())
    scores = spelled_out(query * 0.125, key, causal=True).double()
    out, lse = attend_prompt_with_lse(query, key, value, 0.125)
    expected = scores.softmax(-1) @ value.repeat_interleave(3, 1).double()
    assert (lse - scores.logsumexp(-1)).abs().max() < 0.03
    assert error(out, expected) < 0.01
    assert not torch.equal(out, attend_with_lse(query, key, value, 0.125, causal=True)[0])


@torch.inference_mode()
def test_products_are_exact_where_all_scores_are_high(products):
    # All keys share a number whose scores are 100: rounded to bfloat16 as they are, they would be wrong by .25.
    query, key, value = bfloat16_states(scale=1.0)
    query[..., 0], key[..., 0] = 10.0, 80.0
    expected, lse = exact(query, key, value, 0.125)
    out, found = attend_whole(query, key, value, 0.125)
    assert (found - lse).abs().max() < 0.05
    assert error(out, expected) < 0.01


@torch.inference_mode()
def test_a_score_far_above_the_sample_is_left_to_the_fused_kernel(products):
    # Every sixth key is in the sample, and the score of the second is 300 above all: its exponential overflows.
    query, key, value = bfloat16_states(scale=1.0)
    query[..., 0], key[:, :, 1, 0] = 10.0, 240.0
    fused = attend_with_lse(query, key, value, 0.125)
    assert all(map(torch.equal, attend_whole(query, key, value, 0.125), fused))


@pytest.mark.parametrize(("n_query", "n_key"), [(0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_no_queries_or_no_keys_have_no_mass(n_query, n_key, causal):
    query, key, value = random_states(9)
    out, lse = attend_with_lse(query[:, :, :n_query], key[:, :, :n_key], value[:, :, :n_key], 1.0, causal=causal)
    assert torch.equal(out, torch.zeros(query.shape[0], HEADS, n_query, SIZE))
    assert torch.equal(lse, torch.full((query.shape[0], HEADS, n_query), -math.inf))


def test_two_stretches_merge_by_their_mass():
    # Scores 0 and ln 3 alone: shares 1/4 and 3/4 of the values 8 and 4: 2 + 3 = 5; the mass is 1 + 3 = 4.
    parts = [(torch.full((1, 1, 1, 1), 8.0), torch.zeros(1, 1, 1)),
             (torch.full((1, 1, 1, 1), 4.0), torch.full((1, 1, 1), math.log(3.0)))]  # fmt: skip
    out, lse = merge(parts)
    assert float(out) == pytest.approx(5.0)
    assert float(lse) == pytest.approx(math.log(4.0))


def test_a_stretch_without_mass_counts_for_nothing():
    part = (torch.full((1, 1, 1, 1), 8.0), torch.zeros(1, 1, 1))
    nothing = (torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), float("-inf")))
    assert float(merge([nothing, part])[0]) == 8.0


@pytest.mark.parametrize("cut", [0, 1, 4])
def test_stretches_and_the_own_block_are_causal_attention(cut):
    query, key, value = random_states(9)
    out, _ = attend_segments(query[:, :, 5:], key, value, 1.0, 5, [(0, cut), (cut, 5)])
    whole, _ = attend_with_lse(query, key, value, 1.0, causal=True)
    assert torch.allclose(out, whole[:, :, 5:], atol=1e-5)


def test_reference_scores_are_those_of_rotated_queries_and_keys():
    query, key, _ = random_states(7)
    at = torch.tensor([[0.0, 1.0, 2.5, 4.0, 9.0, 9.5, 12.0]])
    turned = rotate(query, at)[0] @ rotate(key, at)[0].repeat_interleave(3, 0).transpose(-1, -2)
    found = reference_scores(query[0], key[0], at[0][:, None] - at[0][None, :], FREQUENCIES, 1.0)
    assert torch.allclose(found, turned, atol=1e-4)


def test_reference_attention_by_hand():
    # Scores ln 1, ln 3, and one that is not seen: shares 1/4, 3/4 of the values 4 and 8.
    scores = torch.tensor([[[0.0, math.log(3.0), 50.0]]])
    value = torch.tensor([[[4.0], [8.0], [1e6]]])
    assert float(reference_attention(scores, value, torch.tensor([[True, True, False]]))) == pytest.approx(7.0)


def test_rotations_compose_whatever_the_scaling_of_cos_and_sin():
    # YaRN multiplies cos and sin by a: rotating by the pure angles afterwards gives a R(m + n), not a^2 R(m + n).
    states, a = torch.randn(1, 1, 3, SIZE, generator=torch.Generator().manual_seed(0)), 1.37

    def angles(position):
        angle = (position * FREQUENCIES).repeat(2)
        return angle.cos(), angle.sin()

    once = rotate_half_split(states, *(a * part for part in angles(3.0)))
    again = rotate_half_split(once, *angles(4.5))
    assert torch.allclose(again, rotate_half_split(states, *(a * part for part in angles(7.5))), atol=1e-5)
