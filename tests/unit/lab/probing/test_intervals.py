"""Intervals against formulas, and that rows stay paired."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.evaluation.figures import whiskers
from rag_posfix.lab.probing.base import estimate, jackknife, shown


def test_the_interval_of_a_mean_is_that_of_the_normal_law():
    values = torch.randn(200, generator=torch.Generator().manual_seed(1)).double()
    measured = estimate(values)
    error = 1.96 * float(values.std()) / 200**0.5
    assert measured["value"] == pytest.approx(float(values.mean()))
    assert measured["n"] == 200
    low, high = measured["ci95"]
    assert low == pytest.approx(measured["value"] - error, abs=error / 5)
    assert high == pytest.approx(measured["value"] + error, abs=error / 5)
    assert estimate(values) == measured


def test_rows_are_drawn_whole():
    both = torch.randn(30, generator=torch.Generator().manual_seed(2)).double()
    paired = torch.stack((both, both + 3), dim=1)
    measured = estimate(paired, lambda means: means[..., 1] - means[..., 0])
    assert measured["ci95"] == pytest.approx([3, 3])


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = torch.tensor([1.0, 2.0, 4.0, 9.0]).double()
    without = (values.sum() - values) / 3
    error = 1.96 * float(values.std()) / 2
    assert jackknife(4.0, without) == pytest.approx([4 - error, 4 + error])


def test_the_text_has_two_decimals():
    measured = {"value": -0.0384, "ci95": [-0.05, 0.012], "n": 24}
    assert shown(measured) == "-0.04 (-0.05 to 0.01)"
    assert shown(measured, "+.0f") == "-0 (-0 to +0)"
    assert shown(None) == "none"
    assert whiskers([measured]) == [[pytest.approx(0.0116)], [pytest.approx(0.0504)]]


def test_a_resample_without_a_value_does_not_make_the_interval_unknown():
    halves = torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    measured = estimate(halves, lambda means: means[..., 0] / means[..., 1])
    assert (measured["value"], measured["ci95"]) == (0.5, [0.5, 0.5])
