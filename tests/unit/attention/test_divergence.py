"""Divergence of distributions, worked by hand."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.mitigations.context_experts import jensen_shannon


def divergence(left, right):
    return float(jensen_shannon(torch.tensor(left).log(), torch.tensor(right).log()))


def test_it_is_the_mean_divergence_from_the_middle_in_bits():
    # (1/2, 1/2, 0) and (1/2, 0, 1/2): middle (1/2, 1/4, 1/4). KL of either = 1/2 log2(1) + 1/2 log2(2) = 1/2 bit.
    assert divergence((0.5, 0.5, 0.0), (0.5, 0.0, 0.5)) == pytest.approx(0.5)
    # (1, 0) and (1/2, 1/2): (log2(4/3) + 1/2 log2(2/3) + 1/2 log2(2)) / 2 = (0.41504 - 0.29248 + 0.5) / 2.
    assert divergence((1.0, 0.0), (0.5, 0.5)) == pytest.approx(0.31128, abs=1e-5)


def test_it_is_0_for_the_same_and_1_for_nothing_in_common_and_symmetric():
    assert divergence((0.3, 0.7), (0.3, 0.7)) == pytest.approx(0.0, abs=1e-7)
    assert divergence((1.0, 0.0), (0.0, 1.0)) == pytest.approx(1.0)
    assert divergence((0.9, 0.1), (0.4, 0.6)) == pytest.approx(divergence((0.4, 0.6), (0.9, 0.1)))


def test_each_row_is_compared_with_the_one_that_it_broadcasts_to():
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
    assert jensen_shannon(rows, rows[1]).tolist() == pytest.approx([1.0, 0.0])
