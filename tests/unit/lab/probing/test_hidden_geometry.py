"""Planted geometry is recovered: rank, smoothness, right angles, and shares that add up."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.lab.probing.base import StateSums, sums_by_group
from rag_posfix.lab.probing.hidden_geometry import HiddenGeometry, decompose, low_frequency_share, mean_cosine, rank_of
from tests.unit.lab.probing.probed import FromStates, small_decoder

LENGTH, WIDTH = 64, 12
AT = torch.arange(LENGTH).float()


def planted(layer, number):
    """Return mean + a circle over positions + a context direction of its own + noise."""
    noise = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(1000 * layer + number))
    states = 0.05 * noise + 3.0
    states[:, 0] += (AT / 10).cos()
    states[:, 1] += (AT / 10).sin()
    states[:, 2 + number % 8] += 2.0
    return states


@pytest.mark.slow
def test_a_planted_geometry_is_recovered(tmp_path):
    record = HiddenGeometry(contexts=16, tokens=LENGTH).run(FromStates(planted, 3, WIDTH), out=tmp_path)
    for one in record.summary["layers"]:
        assert one["rank"] == 2
        assert one["low_frequencies"] > 0.98
        assert one["cosine"] < 0.1
        # Variances: the circle has nearly 1 less its mean's square, contexts 4 * (1/8 * 7/8) * 8 = 3.5, noise .03.
        assert one["context"] / one["position"] == pytest.approx(3.5 / 0.98, rel=0.1)
        assert one["position"] + one["context"] + one["residual"] == pytest.approx(1)
        assert one["residual"] < 0.02
        assert one["ci95"]["position"][0] <= one["position"] <= one["ci95"]["position"][1]
    assert set(record.files) == {"record", "svg", "png"}


def test_the_parts_are_those_of_a_table_with_two_contexts_by_hand():
    # One channel, positions 1 and 2 after the first, contexts with 1, 3 and 5, 7: mu 4, pos -1 and 1, ctx -2 and 2.
    tables = [torch.tensor([[[9.0], [1.0], [3.0]]]), torch.tensor([[[9.0], [5.0], [7.0]]])]
    found = decompose(StateSums.merged(sums_by_group(tables, skip=1)))
    assert found.position.flatten().tolist() == [-1, 1]
    assert found.context.flatten().tolist() == [-2, 2]
    assert found.shares[:, 0].tolist() == pytest.approx([1 / 5, 4 / 5, 0])


def test_rank_smoothness_and_cosine_by_hand():
    assert rank_of(torch.diag(torch.tensor([3.0, 2.0, 0.1]))) == 2
    assert low_frequency_share((AT / 20).cos()[:, None]) > 0.99
    assert low_frequency_share((AT * 3).cos()[:, None]) < 0.05
    assert mean_cosine(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0], [-2.0, 0.0]])) == pytest.approx(0.5)


def test_a_decoder_with_learned_positions_is_probed():
    record = HiddenGeometry(contexts=6, tokens=32).run(small_decoder("learned", max_positions=64))
    assert [one["layer"] for one in record.summary["layers"]] == [1, 2, 3]


def test_a_model_with_one_layer_is_refused_before_it_is_read():
    subject = FromStates(planted, 1, WIDTH)
    with pytest.raises(UnsupportedModelError, match="given has one layer; hidden-geometry measures what enters"):
        HiddenGeometry(contexts=2, tokens=LENGTH).run(subject)
    assert subject.read_so_far == 0
