"""Parallel windows with several passages each, and set prompting."""

from __future__ import annotations

import itertools

import pytest
import torch

from rag_posfix.attention.windows import WindowedAttention, windows_of
from rag_posfix.errors import ConfigError
from rag_posfix.generation.decode.session import Session
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


@pytest.mark.parametrize("wrong", [{"windows": 0}, {"windows": 1.5}, {"windows": True}, {"indentation": "middle"}])
def test_a_wrong_parameter_is_refused(wrong):
    with pytest.raises(ConfigError, match=f"parallel_windows: {next(iter(wrong))}="):
        create("parallel_windows", wrong)
