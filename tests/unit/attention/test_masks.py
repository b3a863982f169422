"""Masks and positions, against matrices written by hand."""

from __future__ import annotations

import torch

from rag_posfix.attention.masks import independent_passages_mask, materialize, segment_ids
from rag_posfix.mitigations.parallel_windows import window_positions
from tests.support.tiny import toy_layout

# One prefix token, passages of two and three tokens, two suffix tokens.
LAYOUT = toy_layout((2, 3), prefix=1, suffix=2)


def test_segments_are_prefix_passages_suffix():
    assert segment_ids(LAYOUT).tolist() == [0, 1, 1, 2, 2, 2, 3, 3]


def test_passages_see_the_prefix_and_themselves_and_the_suffix_sees_all():
    # fmt: off
    expected = torch.tensor([
        # P  A  A  B  B  B  S  S
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0, 0],  # B starts without having seen A
        [1, 0, 0, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ], dtype=torch.bool)
    # fmt: on
    assert torch.equal(materialize(independent_passages_mask(LAYOUT), 8, 8), expected)


def test_generated_tokens_see_everything_before_them():
    rows = materialize(independent_passages_mask(LAYOUT), 2, 10)
    assert rows.tolist() == [[True] * 9 + [False], [True] * 10]


def test_windows_share_their_start_and_the_suffix_follows_the_longest():
    # P = 1; both passages start at 1; the longest has 3 tokens, so the suffix starts at 1 + 3.
    assert window_positions(LAYOUT).tolist() == [[0, 1, 2, 1, 2, 3, 4, 5]]
