"""Masks and positions, against matrices written by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.attention import masks
from rag_posfix.attention.masks import (
    LSE_KERNELS,
    attend_causal,
    attend_causal_rows,
    attend_prompt_with_lse,
    attend_segments,
    attend_whole,
    attend_with_lse,
    block_diagonal_mask,
    causal_mask,
    causal_rows,
    head_attention,
    last_query_attention,
    last_row,
    materialize,
    merge,
    runs,
    scores,
    segment_ids,
    weigh,
    window_positions,
    windows_mask,
    windows_of,
)
from rag_posfix.attention.rope import rotate_half_split
from rag_posfix.mitigations.context_experts import jensen_shannon
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
from tests.support.tiny import toy_layout

# One prefix token, passages of two and three tokens, two suffix tokens.
LAYOUT = toy_layout((2, 3), prefix=1, suffix=2)
ALONE = windows_of(LAYOUT, None)
MASK = windows_mask(LAYOUT, ALONE)


def test_segments_are_prefix_passages_suffix():
    assert segment_ids(LAYOUT, ALONE).tolist() == [0, 1, 1, 2, 2, 2, 3, 3]


def test_passages_see_the_prefix_and_themselves_and_the_suffix_sees_all():
    # fmt: off
    expected = torch.tensor([
        # P  A  A  B  B  B  S  S
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0, 0],  # B starts without having seen A
        [1, 0, 0, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ], dtype=torch.bool)
    # fmt: on
    assert torch.equal(materialize(MASK, 8, 8), expected)


def test_prompts_in_one_sequence_have_their_own_masks_and_see_nothing_of_each_other():
    def first_alone(query, key):
        return key == 0 * query

    mask = block_diagonal_mask([causal_mask, first_alone, causal_mask], [2, 3, 1])
    # fmt: off
    expected = torch.tensor([
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1],
    ], dtype=torch.bool)
    # fmt: on
    assert torch.equal(materialize(mask, 6, 6), expected)
    assert torch.equal(materialize(mask, 2, 6), expected[4:])


def test_generated_tokens_see_everything_before_them():
    rows = materialize(MASK, 2, 10)
    assert rows.tolist() == [[True] * 9 + [False], [True] * 10]


def test_windows_share_their_start_and_the_suffix_follows_the_longest():
    # P = 1; both passages start at 1; the longest has 3 tokens, so the suffix starts at 1 + 3.
    assert window_positions(LAYOUT, ALONE).tolist() == [[0, 1, 2, 1, 2, 3, 4, 5]]


def test_windows_that_end_together_leave_their_gap_in_front():
    # The passage of two tokens starts one later than that of three.
    assert window_positions(LAYOUT, ALONE, "right").tolist() == [[0, 2, 3, 1, 2, 3, 4, 5]]


def test_windows_hold_neighbours_as_evenly_as_can_be():
    # Five passages of 1..5 tokens after a prefix of one, in two windows: round(2.5) = 2 passages, then 3.
    layout = toy_layout((1, 2, 3, 4, 5), prefix=1)
    assert [(w.start, w.stop) for w in windows_of(layout, 2)] == [(1, 4), (4, 16)]
    assert len(windows_of(layout, None)) == 5
    assert len(windows_of(layout, 9)) == 5
    assert windows_of(toy_layout(()), 3) == ()


def test_passages_of_one_window_see_each_other_causally():
    layout = toy_layout((1, 1, 1), prefix=1, suffix=1)
    # fmt: off
    expected = torch.tensor([
        # P  A  B  C  S
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],  # B shares the window of A (round(1.5) = 2 passages)
        [1, 0, 0, 1, 0],
        [1, 1, 1, 1, 1],
    ], dtype=torch.bool)
    # fmt: on
    assert torch.equal(materialize(windows_mask(layout, windows_of(layout, 2)), 5, 5), expected)


# Attention by segments of keys, against the plain one.


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


def states(rows, n_query, n_key, groups=3, n_kv=2, channels=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, groups * n_kv, n_query, channels, generator=generator)
    key, value = (torch.randn(rows, n_kv, n_key, channels, generator=generator) for _ in range(2))
    return query, key, value


def plain(query, key, value, scaling, start=0):
    """Return attention spelled out: the queries are the newest tokens, and none sees a key before ``start``."""
    n_query, n_key = query.shape[2], key.shape[2]
    at = torch.arange(n_key)
    mask = (at[None] <= at[n_key - n_query :, None]) & (at >= start)
    spelled = scores(query, key, scaling).masked_fill(~mask, float("-inf"))
    return weigh(spelled.softmax(dim=-1), value)


@pytest.mark.parametrize(("n_query", "n_key"), [(1, 1), (1, 40), (7, 7), (5, 40), (40, 41), (300, 700)])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_newest_tokens_see_all_before_them(n_query, n_key, groups):
    query, key, value = states(2, n_query, n_key, groups)
    assert torch.allclose(attend_causal(query, key, value, 0.3), plain(query, key, value, 0.3), atol=1e-5)


def test_they_see_the_same_on_a_device_whose_kernels_return_no_log_sum_exp(monkeypatch):
    monkeypatch.delitem(LSE_KERNELS, "cpu")
    query, key, value = states(2, 5, 40)
    assert torch.allclose(attend_causal(query, key, value, 0.3), plain(query, key, value, 0.3), atol=1e-5)


def test_a_whole_prompt_is_computed_by_the_call_of_transformers():
    query, key, value = states(1, 33, 33)
    stock = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    assert torch.equal(attend_causal(query, key, value, 0.3), stock)


@given(starts=st.lists(st.integers(0, 9), min_size=1, max_size=6), n_query=st.integers(1, 4))
def test_no_row_sees_what_stands_before_its_start(starts, n_query):
    query, key, value = states(len(starts), n_query, 10 + n_query)
    key[:, :, :1] = 50.0  # would draw all attention of a row that starts later
    expected = torch.cat(
        [
            plain(query[r : r + 1], key[r : r + 1], value[r : r + 1], 0.3, start)
            for r, start in enumerate(starts)
        ]
    )  # fmt: skip
    assert torch.allclose(attend_causal_rows(query, key, value, 0.3, starts), expected, atol=1e-5)


def test_neighbours_with_equal_starts_share_a_call():
    assert list(runs([3, 3, 0, 3])) == [(slice(0, 2), 3), (slice(2, 3), 0), (slice(3, 4), 3)]


# Observed attention with soft caps and sinks, by numbers worked by hand and by its definition.


def states_of(*shape, seed=0):
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
    n_key, sinks = 130, states_of(4, seed=3)
    query, key = states_of(2, 4, n_query, 8), states_of(2, 2, n_key, 8, seed=1)
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


# Two key heads, two query heads each, one channel: head h reads key head h // 2.
QUERY = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1, 1)
KEY = torch.tensor([[1.0, 10.0], [100.0, 1000.0]]).view(1, 2, 2, 1)


def test_scores_read_the_key_head_of_their_group():
    # q k 0.5: head 0: 0.5, 5; head 1: 1, 10; head 2 (second key head): 150, 1500; head 3: 200, 2000.
    expected = [[0.5, 5.0], [1.0, 10.0], [150.0, 1500.0], [200.0, 2000.0]]
    assert scores(QUERY, KEY, 0.5)[0, :, 0].tolist() == expected


def test_weights_read_the_value_head_of_their_group():
    # Half of each: (1 + 10) / 2 = 5.5 and (100 + 1000) / 2 = 550.
    found = weigh(torch.full((1, 4, 1, 2), 0.5), KEY)
    assert found.flatten().tolist() == [5.5, 5.5, 550.0, 550.0]


def test_several_rows_keep_their_order():
    query = torch.randn((1, 6, 3, 4), generator=torch.Generator().manual_seed(0))
    key = torch.randn((1, 2, 5, 4), generator=torch.Generator().manual_seed(1))
    found = scores(query, key, 1.0)
    for row in range(3):
        alone = scores(query[:, :, row : row + 1], key, 1.0)
        assert torch.allclose(found[:, :, row : row + 1], alone)
    assert torch.allclose(last_row(query, key, 1.0), found[:, :, 2:])
    out = weigh(found, key)
    assert torch.allclose(out[0, 5, 1], found[0, 5, 1] @ key[0, 1])


# Divergence of distributions, worked by hand.


def divergence(left, right):
    return float(jensen_shannon(torch.tensor(left).log(), torch.tensor(right).log()))


def test_it_is_the_mean_divergence_from_the_middle_in_bits():
    # (1/2, 1/2, 0) and (1/2, 0, 1/2): middle (1/2, 1/4, 1/4). KL of either = 1/2 log2(1) + 1/2 log2(2) = 1/2 bit.
    assert divergence((0.5, 0.5, 0.0), (0.5, 0.0, 0.5)) == pytest.approx(0.5)
    # (1, 0) and (1/2, 1/2): (log2(4/3) + 1/2 log2(2/3) + 1/2 log2(2)) / 2 = (0.41504 - 0.29248 + 0.5) / 2.
    assert divergence((1.0, 0.0), (0.5, 0.5)) == pytest.approx(0.31128, abs=1e-5)


def test_it_is_0_for_the_same_and_1_for_nothing_in_common_and_symmetric():
    assert divergence((0.3, 0.7), (0.3, 0.7)) == pytest.approx(0.0, abs=1e-7)
    assert divergence((1.0, 0.0), (0.0, 1.0)) == pytest.approx(1.0)
    assert divergence((0.9, 0.1), (0.4, 0.6)) == pytest.approx(divergence((0.4, 0.6), (0.9, 0.1)))


def test_each_row_is_compared_with_the_one_that_it_broadcasts_to():
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
    assert jensen_shannon(rows, rows[1]).tolist() == pytest.approx([1.0, 0.0])
