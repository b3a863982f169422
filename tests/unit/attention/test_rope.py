"""The waveform of rotary encoding and the search for bases, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rag_posfix.attention.masks import head_attention, last_query_attention
from rag_posfix.attention.rope import add_rotation, rotate_half_split, search_factors, trough_depth, waveform
from rag_posfix.errors import ConfigError


def test_the_waveform_is_the_scaled_sum_of_the_cosines_of_all_frequencies():
    # d = 4: 2 / sqrt(4) = 1; base 4: frequencies 4^0 = 1 and 4^(-2/4) = 1/2: W(m) = cos m + cos(m / 2).
    found = waveform(4, 4.0, torch.arange(4))
    assert found.tolist() == pytest.approx([math.cos(m) + math.cos(m / 2) for m in range(4)])
    # m = 3: cos 3 = -0.98999, cos 1.5 = 0.07074.
    assert float(found[3]) == pytest.approx(-0.91926, abs=1e-5)


def test_the_waveform_starts_at_the_root_of_the_head_size():
    assert float(waveform(64, 1e4, torch.zeros(1))) == pytest.approx(8.0)  # 2 / 8 * 32 cosines of 0


def test_two_channels_know_no_base():
    assert torch.equal(waveform(2, 10.0, torch.arange(9)), waveform(2, 1e6, torch.arange(9)))


def test_the_depth_of_troughs_is_the_mean_of_the_lowest_tenth():
    wave = torch.arange(20.0).flip(0)  # lowest two of twenty: 0 and 1
    assert trough_depth(wave) == 0.5
    assert trough_depth(torch.tensor([3.0, -1.0])) == -1.0  # at least one


def test_the_search_adds_the_base_that_covers_the_deepest_trough():
    # d = 4, base 4, distances 0 to 3: the deepest is m = 3, W = -0.919. Factor 4: base 16, frequency 1/4:
    # W(3) = cos 3 + cos 0.75 = -0.98999 + 0.73169 = -0.258. Factor 1/4: base 1: W(3) = 2 cos 3 = -1.98, no help.
    # Factor 4 leaves max(W) at m = 3 = -0.258 as the lowest; 1/4 leaves -0.919.
    assert search_factors(4, 4.0, (0.25, 4.0), 2, 4) == (1.0, 4.0)
    assert search_factors(4, 4.0, (4.0, 0.25), 3, 4) == (1.0, 4.0, 0.25)


def test_the_depth_after_a_choice_is_that_of_the_envelope_of_both():
    # Distances 0 to 6, one of seven counts. Base 4: W(m) = cos m + cos(m/2) is lowest at m = 4:
    # -0.65364 - 0.41615 = -1.070. Factor 4 (1/4): cos 4 + cos 1 = -0.113, but then m = 3 with -0.258 is lowest.
    # Factor 1/4 (frequency 1): 2 cos 4 = -1.307 covers nothing: -1.070 stays.
    found = search_factors(4, 4.0, (0.25, 4.0), 2, 7)
    envelope = torch.maximum(waveform(4, 4.0, torch.arange(7)), waveform(4, 16.0, torch.arange(7)))
    assert found == (1.0, 4.0)
    assert trough_depth(envelope) == pytest.approx(math.cos(3) + math.cos(0.75))


def test_each_factor_chosen_raises_the_troughs_at_least_as_much_as_any_other_would():
    candidates, context, base = (0.5, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8, 6.0), 512, 1e4
    chosen = search_factors(32, base, candidates, 4, context)
    assert chosen[0] == 1.0
    assert len(set(chosen)) == 4
    waves = {factor: waveform(32, base * factor, torch.arange(context)) for factor in (1.0, *candidates)}
    envelope = waves[1.0]
    for factor in chosen[1:]:
        depths = {other: trough_depth(torch.maximum(envelope, waves[other])) for other in candidates}
        assert depths[factor] == max(depths[other] for other in candidates)
        envelope = torch.maximum(envelope, waves[factor])


def test_the_default_of_multi_base_is_what_the_search_finds_for_the_default_model():
    # SmolLM2-135M: head size 64, base 100000; the paper's bases are 1 to 2.8 times its models' base, in steps of 0.3.
    candidates = (1.3, 1.6, 1.9, 2.2, 2.5, 2.8)
    assert search_factors(64, 1e5, candidates, 3, 2048) == (1.0, 1.9, 2.8)
    assert search_factors(64, 1e5, candidates, 3, 4096) == (1.0, 1.9, 2.8)


def test_the_search_takes_the_waveforms_that_it_is_given():
    # Lowest of three distances, of the envelope: with 2 max(3 0 1, 0 9 0) -> 1; with 3 max(3 0 1, 0 2 2) -> 2.
    waves = {1.0: [3.0, 0.0, 1.0], 2.0: [0.0, 9.0, 0.0], 3.0: [0.0, 2.0, 2.0]}
    asked = []

    def wave_of(factor):
        asked.append(factor)
        return torch.tensor(waves[factor])

    assert search_factors(4, 4.0, (2.0, 3.0), 2, 3, wave_of) == (1.0, 3.0)
    assert sorted(asked) == [1.0, 2.0, 3.0]


def test_one_factor_is_the_model_s_own_base():
    assert search_factors(4, 4.0, (), 1, 4) == (1.0,)
    assert search_factors(4, 4.0, (1.0, 2.0, 2.0), 2, 4) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 1e4, (2.0,), 2, 10), "no waveform for head_dim=5"),
        ((4, 0.0, (2.0,), 2, 10), "base=0.0"),
        ((4, 1e4, (2.0, -1.0), 2, 10), r"candidates=\(2.0, -1.0\)"),
        ((4, 1e4, (2.0,), 2, 0), "context=0"),
        ((4, 1e4, (2.0,), 3, 10), "count=3 factors cannot be chosen from 1 candidates and 1; it must be 1 to 2"),
        ((4, 1e4, (2.0,), 0, 10), "count=0 factors"),
    ],
)
def test_what_has_no_waveform_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        search_factors(*arguments)


# Rotation against transformers' own, and the attention that is reported against a plain softmax.


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_rotating_a_quarter_turn_by_hand():
    # D = 4 pairs channels (0, 2) and (1, 3). A quarter turn takes (x1, x2) to (-x2, x1).
    states = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    turned = rotate_half_split(states, torch.zeros(4), torch.ones(4))
    assert turned.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]


def test_it_is_the_rotation_of_llama(generator):
    query, key = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (3, 1))
    angle = torch.rand(2, 5, 4, generator=generator).repeat(1, 1, 2)
    expected, _ = apply_rotary_pos_emb(query, key, angle.cos(), angle.sin())
    assert torch.equal(rotate_half_split(query, angle.cos()[:, None], angle.sin()[:, None]), expected)


def test_channels_beyond_the_rotated_ones_pass(generator):
    states = torch.randn(1, 1, 2, 8, generator=generator)
    turned = rotate_half_split(states, torch.zeros(4), torch.ones(4))
    assert torch.equal(turned[..., 4:], states[..., 4:])


def test_several_rotations_of_one_vector_add_up(generator):
    states = torch.randn(3, 5, 8, generator=generator)
    first, second = (angle.repeat(1, 1, 1, 2) for angle in torch.rand(2, 2, 1, 5, 3, generator=generator))  # 6 of 8
    turned = rotate_half_split(rotate_half_split(states, first.cos(), first.sin()), second.cos(), second.sin())
    expected = rotate_half_split(states, (first + second).cos(), (first + second).sin())
    assert expected.shape == (2, 3, 5, 8)
    torch.testing.assert_close(turned, expected, atol=1e-6, rtol=0)


def test_attention_of_the_last_query_by_hand():
    # One head, two keys with scores 0 and ln 3: shares 1/4 and 3/4.
    query = torch.tensor([[0.0, 0.0], [1.0, 0.0]]).view(1, 1, 2, 2)
    key = torch.tensor([[0.0, 5.0], [math.log(3), -2.0]]).view(1, 1, 2, 2)
    assert last_query_attention(query, key, None, 1.0).tolist() == [pytest.approx([0.25, 0.75])]


def test_attention_by_head_reads_the_key_head_of_the_group():
    # Queries of four heads, all (1, 0); keys of head 0 score 0 and ln 3, of head 1 ln 3 and 0: query heads 0 and 1
    # have shares 1/4 and 3/4, 2 and 3 have 3/4 and 1/4.
    query = torch.tensor([1.0, 0.0]).expand(1, 4, 1, 2)
    key = torch.tensor([[[0.0, 5.0], [math.log(3), -2.0]], [[math.log(3), 1.0], [0.0, 4.0]]])[None]
    (found,) = head_attention(query, key, None, 1.0, (3, 1, 2, 0)).tolist()
    first, second = pytest.approx([0.25, 0.75]), pytest.approx([0.75, 0.25])
    assert found == [second, first, second, first]


def test_the_turn_of_a_key_head_is_that_of_the_query_heads_of_its_group():
    # Two key heads turn by a quarter, (x1, x2) -> (-x2, x1), and by a half, (-x1, -x2); four query heads.
    states = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]).view(1, 4, 1, 2)
    turned = add_rotation(states, torch.tensor([1j, -1.0], dtype=torch.complex64).view(1, 2, 1, 1))
    assert turned.view(4, 2).tolist() == [[-2.0, 1.0], [-4.0, 3.0], [-5.0, -6.0], [-7.0, -8.0]]


@pytest.mark.parametrize("additive", [False, True])
def test_a_masked_key_gets_no_attention(additive, generator):
    query, key = torch.randn(1, 4, 3, 8, generator=generator), torch.randn(1, 2, 5, 8, generator=generator)
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    mask[..., 1] = False
    given = torch.zeros(1, 1, 3, 5).masked_fill(~mask, float("-inf")) if additive else mask
    found = last_query_attention(query, key, given, 8**-0.5)
    assert found[0, 1] == 0
    assert float(found.sum()) == pytest.approx(1.0)
