"""Planted positional vectors are recovered, and their share of the variance."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.lab.probing.base import StateSums, sums_by_group
from rag_posfix.lab.probing.hidden_geometry import decompose
from rag_posfix.lab.probing.positional_vectors import PositionalVectors, similarities
from tests.unit.lab.probing.probed import FromStates, small_decoder

LENGTH, WIDTH = 33, 6
AT = torch.arange(LENGTH).float()
CURVE = torch.stack([(AT / 5).cos(), (AT / 5).sin()], dim=-1)  # (T, 2)


def planted(layer, number):
    """Layer 1 has a circle in channels 0 and 1, and content of variance 1/2 that a second string takes back."""
    states = torch.zeros(LENGTH, WIDTH)
    sign = 1 if number % 2 else -1
    states[:, 2] = sign * 0.5**0.5
    if layer == 1:
        states[:, :2] = CURVE
    return states


def test_planted_vectors_and_their_share_are_recovered():
    states = [torch.stack([planted(layer, n) for layer in (0, 1)]) for n in range(4)]
    parts = decompose(StateSums.merged(sums_by_group(states, 1, groups=2)))
    vectors, shares = parts.position, parts.shares[0]
    centred = CURVE[1:] - CURVE[1:].mean(dim=0)
    torch.testing.assert_close(vectors[1, :, :2].float(), centred)
    assert vectors[1, :, 2:].abs().max() == 0
    spread = float(centred.square().sum(dim=-1).mean())
    assert shares.tolist() == pytest.approx([0.0, spread / (spread + 0.5)], abs=1e-6)


def test_the_similarity_is_the_cosine():
    found = similarities(torch.tensor([[[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]]))
    torch.testing.assert_close(found[0], torch.tensor([[1.0, 0, -1], [0, 1, 0], [-1, 0, 1]]))


def test_the_layer_in_which_positions_appear_is_told():
    record = PositionalVectors(strings=4, tokens=LENGTH, skip=1).run(FromStates(planted, 2, WIDTH))
    assert record.summary["first_layer_above_a_tenth"] == 1
    low, high = record.summary["ci95"]["share_of_variance"][1]
    assert low <= record.summary["share_of_variance"][1] <= high
    assert record.summary["similarity_to_next"][1] > 0.9 > record.summary["similarity_at_half_the_length"][1]


@pytest.mark.slow
def test_learned_positions_are_in_the_first_layer_and_nope_has_none(tmp_path):
    learned = PositionalVectors(strings=8, tokens=32).run(small_decoder("learned", max_positions=64), out=tmp_path)
    nope = PositionalVectors(strings=8, tokens=32).run(small_decoder("nope"))
    assert learned.summary["share_of_variance"][0] > nope.summary["share_of_variance"][0] + 0.2
    assert set(learned.files) == {"record", "svg", "png"}
