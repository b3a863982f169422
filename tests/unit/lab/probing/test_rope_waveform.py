"""The model's own rotation against the closed form of the waveform, and the troughs by hand."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.attention.rope import trough_depth, waveform
from rag_posfix.cli.options import checked_choices
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.generation.engine import Engine
from rag_posfix.lab.probing.rope_waveform import RopeWaveform, deepest_troughs, own_waveform
from rag_posfix.lab.probing.subject import LanguageModel
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder
from tests.unit.lab.probing.probed import small_decoder, tiny_model

AT = torch.arange(100)


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])
def test_the_rotation_of_a_model_makes_the_closed_form(family):
    found, channels, base = own_waveform(LanguageModel(Engine(loaded_model(family), ToyEncoder(), "x", "y")), AT)
    assert channels == {"llama": 8, "qwen3": 16, "olmo2": 8}[family]
    torch.testing.assert_close(found, waveform(channels, base, AT), atol=1e-4, rtol=1e-4)


def test_the_rotation_of_a_small_decoder_makes_the_closed_form():
    found, channels, base = own_waveform(small_decoder("rope", base=50.0), AT)
    assert (channels, base) == (16, 50.0)
    torch.testing.assert_close(found, waveform(16, 50.0, AT), atol=1e-4, rtol=1e-4)


def subject_of(family):
    return LanguageModel(Engine(loaded_model(family), ToyEncoder(), "x", "y"))


def scaled_wave(subject, factor, distances):
    """Return the waveform of a model by its own frequencies f_i: (2 a / sqrt(d)) sum_i cos(m f_i factor^(-2i / d))."""
    rotary = subject.engine.loaded.model.model.rotary_emb
    own = rotary.inv_freq.double()
    pairs = torch.arange(len(own), dtype=torch.float64) / len(own)
    angles = distances.double()[:, None] * own * factor**-pairs
    return 2 * rotary.attention_scaling / (2 * len(own)) ** 0.5 * angles.cos().sum(dim=-1)


@pytest.mark.parametrize("family", ["llama", "llama3", "llama_yarn"])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_a_factor_multiplies_the_frequencies_as_they_are_scaled(family, factor):
    subject = subject_of(family)
    found, channels, base = own_waveform(subject, AT, factor)
    torch.testing.assert_close(found, scaled_wave(subject, factor, AT), atol=1e-4, rtol=1e-4)
    closed = waveform(channels, base * factor, AT)
    assert (float((found - closed).abs().max()) < 1e-3) == (family == "llama")


def test_a_factor_of_a_small_decoder_multiplies_its_base():
    found, _, base = own_waveform(small_decoder("rope", base=50.0), AT, 3.0)
    assert base == 50.0
    torch.testing.assert_close(found, waveform(16, 150.0, AT), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "llama3", "llama_yarn"])
def test_factors_depths_and_figure_are_those_of_the_model_s_own_waves(family):
    subject, probe, distances = subject_of(family), RopeWaveform(context=256, bases=3), torch.arange(256)
    record = probe.run(subject)
    summary = record.summary
    envelope = scaled_wave(subject, 1.0, distances)
    left = torch.linspace(1, 3, 41).tolist()[1:]
    for number, factor in enumerate(summary["factors"]):  # each covers the troughs best of those that are left
        if number:
            deepest = [trough_depth(torch.maximum(envelope, scaled_wave(subject, each, distances))) for each in left]
            envelope = torch.maximum(envelope, scaled_wave(subject, factor, distances))
            assert trough_depth(envelope) == pytest.approx(max(deepest), abs=1e-4)
            left.remove(factor)
        assert summary["trough_depth"][number] == pytest.approx(trough_depth(envelope), abs=1e-4)
    own, covered = (line.get_ydata() for line in probe.draw(record.head).axes[0].lines[:2])
    assert list(own) == [row["own"] for row in record.rows]
    assert list(covered) == [row["envelope"] for row in record.rows]
    assert list(covered) == pytest.approx(envelope.tolist(), abs=1e-4)


def test_a_model_that_does_not_rotate_is_refused():
    with pytest.raises(UnsupportedModelError, match="a decoder with alibi does not rotate"):
        own_waveform(small_decoder("alibi"), AT)


def test_troughs_are_local_minima_the_deepest_first():
    assert deepest_troughs(torch.tensor([5.0, 1.0, 3.0, 0.0, 2.0, 2.0, 1.5])) == [3, 1]


def test_more_bases_never_make_a_trough_deeper_and_the_search_is_in_the_record(tmp_path):
    record = RopeWaveform(context=64, bases=3, candidates=5).run(tiny_model(), out=tmp_path)
    assert record.summary["factors"][0] == 1.0
    depths = record.summary["trough_depth"]
    assert depths == sorted(depths)
    assert record.summary["difference_from_closed_form"] < 1e-4
    assert len(record.rows) == 64
    assert record.files["png"].stat().st_size > 1000


def test_what_is_printed_says_where_attention_is_low_and_which_method_reads_with_the_bases():
    probe = RopeWaveform(context=64, bases=2, candidates=5)
    record = probe.run(tiny_model())
    lines = probe.lines(record)
    trough = record.summary["troughs"][0]
    assert f"at distances of {trough['distance']} (W = {trough['value']:.3f})" in lines[-3]
    first, last = record.summary["trough_depth"]
    assert lines[-2] == f"2 bases lift the mean of the lowest tenth of W from {first:.3f} to {last:.3f}"
    method = lines[-1].removeprefix("to read with these bases: --mitigation ").strip("'")
    assert checked_choices(method)[0].parameters["factors"] == [round(f, 6) for f in record.summary["factors"]]
