"""The waveform of rotary encoding and the search for bases, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.attention.rope import search_factors, trough_depth, waveform
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
