"""The curve of layer_scaling, worked by hand, and that each layer rotates by what the curve says."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from rag_posfix.mitigations.layer_scaling import bezier
from rag_posfix.plan.plan import Plan, RowPlan
from tests.support.tiny import loaded_model, toy_layout


@pytest.fixture(scope="module")
def llama():
    return loaded_model()


def scales(shape, n_layers, points):
    shape = dataclasses.replace(shape, n_layers=n_layers)
    (row,) = create("layer_scaling", {"points": points}).plan(toy_layout(), shape).rows
    return row.layer_scale


def test_the_divisors_are_the_heights_of_the_curve_at_the_depths_of_the_layers(llama):
    # Points (1, 2, 4), s(t) = (1-t)^2 * 1 + 2 t (1-t) * 2 + t^2 * 4; five layers are t = 0, 1/4, 1/2, 3/4, 1:
    #   t = 1/4: 9/16 + 12/16 + 4/16 = 25/16; t = 1/2: 1/4 + 1 + 1 = 9/4; t = 3/4: 1/16 + 12/16 + 36/16 = 49/16.
    found = scales(llama.spec.shape, 5, (1, 2, 4))
    assert found.dtype == torch.float32
    assert found.tolist() == [1.0, 25 / 16, 9 / 4, 49 / 16, 4.0]


def test_two_points_are_a_straight_line(llama):
    assert scales(llama.spec.shape, 3, (1, 2)).tolist() == [1.0, 1.5, 2.0]


def test_one_point_is_the_same_divisor_in_every_layer(llama):
    assert scales(llama.spec.shape, 4, (1.5,)).tolist() == [1.5] * 4


def test_a_model_of_one_layer_uses_the_first_point(llama):
    assert scales(llama.spec.shape, 1, (1.25, 3)).tolist() == [1.25]


@pytest.mark.parametrize("at", [0.0, 0.1, 1 / 3, 0.7, 1.0])
def test_repeated_interpolation_is_the_sum_of_bernstein_polynomials(at):
    points = (1.0, 0.4, 2.5, 1.7, 3.0)
    n = len(points) - 1
    expected = sum(math.comb(n, i) * (1 - at) ** (n - i) * at**i * p for i, p in enumerate(points))
    assert bezier(points, at) == pytest.approx(expected)


@pytest.mark.parametrize("height", [0.1, 1.0, 1.1, 7.3])
def test_equal_heights_give_exactly_that_height_at_every_depth(height):
    assert {bezier([height] * 7, layer / 29) for layer in range(30)} == {height}


def test_one_height_for_all_layers_is_dividing_all_positions(llama):
    layout = toy_layout()
    halves = torch.arange(len(layout.token_ids)).float()[None] / 2
    expected = Session(llama, layout, Plan(rows=(RowPlan(positions=halves),)))
    found = Session(llama, layout, create("layer_scaling", {"points": (2.0,)}).plan(layout, llama.spec.shape))
    assert float((found.next_log_probs() - expected.next_log_probs()).abs().max()) < 1e-6


def test_a_layer_s_divisor_reaches_that_layer(llama):
    layout, found = toy_layout(), []
    for points in ((1.0, 2.0), (2.0, 1.0), (1.5,)):
        plan = create("layer_scaling", {"points": points}).plan(layout, llama.spec.shape)
        found.append(Session(llama, layout, plan).next_log_probs())
    assert all(float((found[i] - found[j]).abs().max()) > 1e-4 for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_list_from_json_is_kept_as_a_tuple():
    assert create("layer_scaling", {"points": [1, 2]}) == create("layer_scaling", {"points": (1.0, 2.0)})
    assert create("layer_scaling", {"points": [1, 2]}).points == (1.0, 2.0)
    prints = [create("layer_scaling", {"points": points}).fingerprint() for points in ([1, 2], (1.0, 2.0))]
    assert prints[0] == prints[1]
