"""Parallel windows with several passages each, and set prompting."""

from __future__ import annotations

import itertools

import pytest
import torch

from rag_posfix.attention.masks import WindowedAttention, window_positions, windows_of
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from tests.support.attending import random_states, reference, run
from tests.support.tiny import loaded_model, toy_layout


def log_probs(name, layout, **parameters):
    loaded = loaded_model()
    return Session(loaded, layout, create(name, parameters).plan(layout, loaded.spec.shape)).next_log_probs()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_attention_window_by_window_is_the_mask_spelled_out(count):
    layout = toy_layout((3, 2, 4, 1), prefix=2, suffix=3)
    n = len(layout.token_ids)
    states, positions = random_states(n), torch.arange(n).float()[None]
    attend = WindowedAttention(layout, windows_of(layout, count))
    distance = positions[0][:, None] - positions[0][None, :]
    out, _ = run(attend, *states, positions)
    assert torch.allclose(out, reference(*states, distance, attend.visible(n)), atol=1e-5)


@pytest.mark.parametrize(
    ("passages", "count", "sizes"),
    [
        (5, 3, [2, 1, 2]),  # bounds at 5/3 and 10/3, rounded to 2 and 3
        (4, 3, [1, 2, 1]),  # 4/3 and 8/3: 1 and 3
        (6, 3, [2, 2, 2]),
        (3, 3, [1, 1, 1]),
        (3, 4, [1, 1, 1]),  # no window is empty
        (3, None, [1, 1, 1]),
        (0, 2, []),
    ],
)
def test_windows_hold_numbers_of_passages_as_even_as_can_be(passages, count, sizes):
    layout = toy_layout((1,) * passages, prefix=2)
    windows = windows_of(layout, count)
    assert [len(window) for window in windows] == sizes
    assert all(a.stop == b.start for a, b in itertools.pairwise(windows))


@pytest.mark.parametrize(
    ("indentation", "positions"),
    [
        # Prefix of two, windows of three and one, suffix of two.
        ("left", [0, 1, 2, 3, 4, 2, 5, 6]),
        ("right", [0, 1, 2, 3, 4, 4, 5, 6]),
    ],
)
def test_windows_begin_together_or_end_together(indentation, positions):
    layout = toy_layout((3, 1), prefix=2, suffix=2)
    assert window_positions(layout, layout.passages, indentation).tolist() == [positions]
    plan = create("parallel_windows", {"indentation": indentation}).plan(layout, loaded_model().spec.shape)
    longer_first = plan.rows[0].passages == (0, 1)
    swapped = [*positions[:2], positions[5], *positions[2:5], *positions[6:]]
    assert plan.rows[0].positions.tolist() == [positions if longer_first else swapped]


def test_one_window_is_the_unmodified_model_on_the_canonical_order():
    layout = toy_layout()
    canonical = layout.select(layout.canonical_order())
    assert torch.allclose(log_probs("parallel_windows", layout, windows=1), log_probs("none", canonical), atol=1e-5)


def test_a_window_for_each_passage_is_set_prompting():
    layout = toy_layout()
    assert torch.equal(log_probs("parallel_windows", layout), log_probs("set_prompting", layout))
    assert torch.equal(log_probs("parallel_windows", layout, windows=4), log_probs("set_prompting", layout))
    assert not torch.allclose(log_probs("parallel_windows", layout, windows=2), log_probs("set_prompting", layout))


@pytest.mark.parametrize(
    "parameters", [{"windows": 2}, {"windows": 3, "indentation": "right"}, {"indentation": "right"}]
)
def test_every_order_gives_the_same_with_several_passages_per_window(parameters):
    layout = toy_layout()
    base = log_probs("parallel_windows", layout, **parameters)
    for order in itertools.permutations(range(4)):
        found = log_probs("parallel_windows", layout.select(order), **parameters)
        assert float((found - base).abs().max()) < 1e-5, order
