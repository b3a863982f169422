"""The model's own rotation against the closed form of the waveform, and the troughs by hand."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.attention.rope import waveform
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.generation.engine import Engine
from rag_posfix.probing.rope_waveform import RopeWaveform, deepest_troughs, own_waveform
from rag_posfix.probing.subject import LanguageModel
from tests.support.probed import small_decoder, tiny_model
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder

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
