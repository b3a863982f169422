"""The variance law on random weights, the resolution by hand, and the record."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.lab.probing.norm_by_position import NormByPosition, log_slope, norm_curves, resolution
from tests.unit.lab.probing.probed import small_decoder


def test_without_encoding_the_variance_of_random_attention_is_that_of_a_mean_of_t_values():
    found = norm_curves(small_decoder("nope", deviation=0.02), strings=40, tokens=128, entropy=True)
    assert log_slope(found.variance[0]) == pytest.approx(-1, abs=0.05)
    low, high = found.slope_ci95
    assert low < log_slope(found.variance[0]) < high < low + 0.3
    for place in (8, 32, 128):
        share = float(found.variance[0, place - 1] / found.variance[0, 0])
        assert share == pytest.approx(1 / place, rel=0.35)
    # Attention is nearly uniform at such weights: its entropy is a little below log t.
    assert 0 < math.log(128) - float(found.entropy[0, -1]) < 0.01


def test_a_scale_lowers_the_entropy():
    plain = norm_curves(small_decoder("nope"), 4, 64, entropy=True).entropy
    sharp = norm_curves(small_decoder("nope", scale=5.0), 4, 64, entropy=True).entropy
    assert (sharp[0, 8:] < plain[0, 8:]).all()


def test_the_slope_of_a_power_is_its_exponent():
    assert log_slope(torch.arange(1, 50).double() ** -1.5) == pytest.approx(-1.5)


def test_the_resolution_counts_positions_that_differ_by_both_spreads():
    norm = torch.tensor([8.0, 7.5, 6.0, 5.5, 4.0])
    # 7.5 is within 1 + 1 of 8; 6 is 2 away and counts; 5.5 is not far from 6; 4 is 2 away.
    assert resolution(norm, torch.ones(5)) == [1, 1, 2, 2, 3]
    assert resolution(norm, torch.zeros(5)) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_decoder_is_probed_and_recorded_with_a_picture(tmp_path):
    record = NormByPosition(strings=3, tokens=32).run(small_decoder("cope"), out=tmp_path)
    assert set(record.files) == {"record", "svg", "png"}
    models = record.summary["models"]
    assert list(models) == [
        "untrained cope", "untrained nope, weights 0.02", "untrained nope", "untrained nope, scale 3",
        "untrained rope", "untrained alibi",
    ]  # fmt: skip
    assert all(len(model["slope_by_seed"]) == 3 for name, model in models.items() if name != "untrained cope")
    assert record.head["kind"] == "probe-norm-by-position"
    assert record.head["settings"] == {"strings": 3, "tokens": 32, "scale": 3.0, "seed": 0}
