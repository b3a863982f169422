"""The spline auto-encoder: its basis by hand, what it cannot know, and that it learns."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from rag_posfix.errors import ConfigError
from rag_posfix.lab.encodings import Decoder, DecoderShape
from rag_posfix.lab.encodings.spline import Spline, SplineAutoencoder, spline_basis

SHAPE = DecoderShape(vocabulary=12, layers=2, heads=2, width=32, inner=64)


def autoencoder(spline, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SplineAutoencoder(spline, SHAPE)


def test_the_basis_by_hand():
    # As many points as degree + 1: Bernstein's polynomials. At 1/2: 1/8, 3/8, 3/8, 1/8; the ends are the end points.
    found = spline_basis(4, 3, torch.tensor([0.0, 0.5, 1.0]))
    assert found.tolist() == [[1, 0, 0, 0], [0.125, 0.375, 0.375, 0.125], [0, 0, 0, 1]]
    # Degree 1 goes in straight lines from point to point: a quarter is halfway from the first to the second of three.
    assert spline_basis(3, 1, torch.tensor([0.25, 0.5])).tolist() == [[0.5, 0.5, 0], [0, 1, 0]]


@pytest.mark.parametrize(("points", "degree"), [(8, 3), (5, 2), (6, 1)])
def test_weights_sum_to_one_and_lie_near_their_own_point(points, degree):
    found = spline_basis(points, degree, torch.linspace(0, 1, 41))
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(41, dtype=torch.float64))
    assert (found >= 0).all()
    assert ((found > 0).sum(dim=-1) <= degree + 1).all()


def test_the_encoder_does_not_know_the_order_of_its_tokens():
    model = autoencoder(Spline()).eval()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    mixed = model.control_points(ids[:, [5, 2, 0, 1, 4, 3]])
    torch.testing.assert_close(mixed, model.control_points(ids), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_it_learns_to_reconstruct_rising_sequences():
    generator = torch.Generator().manual_seed(0)
    model = autoencoder(Spline(control_points=6))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    right = 0.0
    for _ in range(150):
        ids = torch.randint(0, 12, (32, 6), generator=generator).sort(dim=1).values
        logits = model(ids)
        loss = cross_entropy(logits.flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = float((logits.argmax(dim=-1) == ids).float().mean())
    assert right > 0.5  # chance is 1/12, the most likely token of each place about 0.25


def test_it_is_no_encoding_of_decoders():
    with pytest.raises(ConfigError, match="spline is an auto-encoder"):
        Decoder(Spline(), SHAPE)
    with pytest.raises(ConfigError, match="control_points=3 must be above degree=3"):
        Spline(control_points=3)
