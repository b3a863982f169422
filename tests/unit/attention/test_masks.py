"""Masks and positions, against matrices written by hand."""

from __future__ import annotations

import torch

from rag_posfix.attention.masks import (
    block_diagonal_mask,
    causal_mask,
    materialize,
    segment_ids,
    window_positions,
    windows_mask,
    windows_of,
)
from tests.support.tiny import toy_layout

# One prefix token, passages of two and three tokens, two suffix tokens.
LAYOUT = toy_layout((2, 3), prefix=1, suffix=2)
ALONE = windows_of(LAYOUT, None)
MASK = windows_mask(LAYOUT, ALONE)


def test_segments_are_prefix_passages_suffix():
    assert segment_ids(LAYOUT, ALONE).tolist() == [0, 1, 1, 2, 2, 2, 3, 3]


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
    assert torch.equal(materialize(MASK, 8, 8), expected)


def test_prompts_in_one_sequence_have_their_own_masks_and_see_nothing_of_each_other():
    def first_alone(query, key):
        return key == 0 * query

    mask = block_diagonal_mask([causal_mask, first_alone, causal_mask], [2, 3, 1])
    # fmt: off
    expected = torch.tensor([
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1],
    ], dtype=torch.bool)
    # fmt: on
    assert torch.equal(materialize(mask, 6, 6), expected)
    assert torch.equal(materialize(mask, 2, 6), expected[4:])


def test_generated_tokens_see_everything_before_them():
    rows = materialize(MASK, 2, 10)
    assert rows.tolist() == [[True] * 9 + [False], [True] * 10]


def test_windows_share_their_start_and_the_suffix_follows_the_longest():
    # P = 1; both passages start at 1; the longest has 3 tokens, so the suffix starts at 1 + 3.
    assert window_positions(LAYOUT, ALONE).tolist() == [[0, 1, 2, 1, 2, 3, 4, 5]]


def test_windows_that_end_together_leave_their_gap_in_front():
    # The passage of two tokens starts one later than that of three.
    assert window_positions(LAYOUT, ALONE, "right").tolist() == [[0, 2, 3, 1, 2, 3, 4, 5]]


def test_windows_hold_neighbours_as_evenly_as_can_be():
    # Five passages of 1..5 tokens after a prefix of one, in two windows: round(2.5) = 2 passages, then 3.
    layout = toy_layout((1, 2, 3, 4, 5), prefix=1)
    assert [(w.start, w.stop) for w in windows_of(layout, 2)] == [(1, 4), (4, 16)]
    assert len(windows_of(layout, None)) == 5
    assert len(windows_of(layout, 9)) == 5
    assert windows_of(toy_layout(()), 3) == ()


def test_passages_of_one_window_see_each_other_causally():
    layout = toy_layout((1, 1, 1), prefix=1, suffix=1)
    # fmt: off
    expected = torch.tensor([
        # P  A  B  C  S
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],  # B shares the window of A (round(1.5) = 2 passages)
        [1, 0, 0, 1, 0],
        [1, 1, 1, 1, 1],
    ], dtype=torch.bool)
    # fmt: on
    assert torch.equal(materialize(windows_mask(layout, windows_of(layout, 2)), 5, 5), expected)
