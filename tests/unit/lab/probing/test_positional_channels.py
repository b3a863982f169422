"""The ranking of channels on curves whose smoothness is known, and the means against the stock model's own states."""

from __future__ import annotations

import statistics

import pytest
import torch

from rag_posfix.errors import ConfigError
from rag_posfix.generation.engine import Engine
from rag_posfix.lab.probing.positional_dimensions import mean_hidden_states, rank_channels
from rag_posfix.lab.probing.subject import LanguageModel
from tests.support.tiny import VOCABULARY, loaded_model, stock_model
from tests.support.toy_encoder import ToyEncoder

LENGTH = 100
AT = torch.arange(LENGTH).double()


def subject(loaded):
    return LanguageModel(Engine(loaded, ToyEncoder(), "tiny", "print"))


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def curves(n_layers=8, **channels):
    """Means (L, T, 6) of noise, with given channels (c0, c1, ...) set to a curve in the layers that are given."""
    means = noise(n_layers, LENGTH, 6)
    for name, (curve, layers) in channels.items():
        for layer in layers:
            means[layer, :, int(name[1:])] = curve.float()
    return means


def test_a_straight_line_is_the_smoothest_and_noise_is_left_out():
    found = rank_channels(curves(c4=(AT, range(8)), c2=(-(AT**2), range(8))))
    assert [one.channel for one in found] == [4, 2]
    assert found[0].roughness == pytest.approx(0.0, abs=1e-9)
    assert found[0].layers == (1, 2, 3, 4, 5, 6, 7)  # not the first: its attention reads embeddings


def test_the_roughness_is_the_sum_of_the_squared_second_differences_of_the_smoothed_even_curve():
    # t^2 at t = 30 ... 99 (the first three tenths are left out), a moving average over ten leaves 61 points and 59
    # second differences, each 2 as those of t^2 are; divided by the standard deviation: 59 * 2^2 / variance.
    expected = 59 * 4 / statistics.variance([t * t for t in range(30, 100)])
    (found,) = rank_channels(curves(c3=(AT**2, range(8))))
    assert found.roughness == pytest.approx(expected, rel=1e-3)


def test_a_channel_does_not_win_by_being_small():
    wavy = AT + (AT / 3).sin()
    found = rank_channels(curves(c0=(1e-3 * wavy, range(8)), c1=(1e3 * AT, range(8))))
    assert [one.channel for one in found] == [1, 0]


def test_more_than_a_quarter_of_the_layers_is_needed():
    # Eight layers: three are needed, and the first does not count.
    found = rank_channels(curves(c0=(AT, (2, 5)), c1=(AT, (0, 3, 4)), c5=(AT, (2, 4, 7))))
    assert [one.channel for one in found] == [5]
    assert found[0].layers == (2, 4, 7)


def test_rising_and_falling_layers_count_apart():
    means = curves(c0=(AT, (1, 2)), c1=(AT, (1, 2, 3)))
    means[3:5, :, 0] = -AT.float()  # two rise and two fall: neither is more than a quarter of eight
    assert [entry.channel for entry in rank_channels(means)] == [1]
    assert [entry.channel for entry in rank_channels(means, one_direction=False)] == [0, 1]
    means[5:7, :, 1] = -AT.float()
    (channel,) = rank_channels(means)
    assert channel.layers == (1, 2, 3)


def test_a_curve_that_turns_is_not_monotone_and_one_that_falls_is():
    turning = (AT - 65) ** 2  # turns within 30 ... 99
    found = rank_channels(curves(c0=(turning, range(8)), c1=(-AT, range(8))))
    assert [one.channel for one in found] == [1]
    early = (AT - 15) ** 2  # turns in the part that is left out
    assert [one.channel for one in rank_channels(curves(c0=(early, range(8))))] == [0]


def test_a_channel_that_is_constant_follows_nothing():
    assert rank_channels(curves(c0=(torch.full((LENGTH,), 3.0), range(8)))) == []


def test_only_the_top_is_kept_and_channels_alike_stay_in_their_order():
    means = curves(c1=(AT, range(8)), c3=(AT, range(8)), c5=(AT, range(8)))
    assert [one.channel for one in rank_channels(means, top=2)] == [1, 3]


def test_a_model_of_one_layer_has_no_candidate():
    assert rank_channels(curves(n_layers=1, c0=(AT, (0,)))) == []


@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_the_means_are_those_of_the_residual_stream_and_of_the_states_after_the_input_norm(family):
    loaded, stock = loaded_model(family), stock_model(family)
    entered, seen = [], []
    for layer in stock.model.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda module, given: entered.append(given[0][0]))
        layer.input_layernorm.register_forward_hook(lambda module, given, result: seen.append(result[0]))
    generator = torch.Generator().manual_seed(5)
    with torch.inference_mode():
        for _ in range(3):
            stock(torch.randint(0, VOCABULARY, (1, 70), generator=generator), use_cache=False)
    n_layers = loaded.spec.shape.n_layers
    steps = []
    means = mean_hidden_states(subject(loaded), 3, 70, seed=5, progress=lambda *step: steps.append(step))
    for mean, states in zip(means, (entered, seen), strict=True):
        expected = torch.stack([torch.stack(states[layer::n_layers]).mean(dim=0) for layer in range(n_layers)])
        assert mean.shape == (n_layers, 70, 64)
        assert torch.allclose(mean, expected, atol=1e-6)
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_probing_leaves_the_model_as_it_was():
    loaded, ids = loaded_model(), torch.arange(3, 40)[None]
    with torch.inference_mode():
        before = loaded.model(ids).logits
        mean_hidden_states(subject(loaded), 1, 64)
        assert torch.equal(loaded.model(ids).logits, before)


def test_strings_that_cannot_be_read_are_refused():
    for strings, tokens in ((1, 63), (1, 513)):
        with pytest.raises(ConfigError, match=f"tokens={tokens} cannot be probed; give 64 to 512, the context"):
            mean_hidden_states(subject(loaded_model()), strings, tokens)
    with pytest.raises(ConfigError, match="strings=0 cannot be probed"):
        mean_hidden_states(subject(loaded_model()), 0, 64)
