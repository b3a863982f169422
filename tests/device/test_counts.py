"""What a method asks of the device does not grow: calls and waits of a prompt and of a token after it.

Numbers are those of ``benchmarks/device_calls.py`` for four layers and eight passages of 40 tokens. Lower a bound that
is not reached any more.
"""

import pytest

from benchmarks.device_calls import METHODS, count_method

LAYERS = 4
BOUNDS = {
    "stock": (242, 0, 1, 230),
    "none": (355, 0, 2, 259),
    "default": (1462, 0, 10, 325),
    "blended": (1838, 1, 12, 259),
    "calibrated_attention": (4449, 1, 22, 315),
    "canonical_rotations": (2792, 0, 17, 627),
    "committee": (1832, 0, 13, 406),
    "context_experts": (1456, 0, 9, 321),
    "head_scaling": (607, 0, 2, 471),
    "hidden_scaling": (677, 0, 2, 491),
    "inter_document": (2399, 0, 6, 803),
    "layer_scaling": (411, 0, 2, 315),
    "multi_base": (1197, 0, 6, 528),
    "parallel_encoding": (1312, 0, 8, 375),
    "parallel_windows": (1168, 0, 8, 259),
    "passage_answers": (12105, 25, 14, 266),
    "set_prompting": (1168, 0, 8, 259),
    "shifted_rotary": (363, 0, 2, 267),
    "sorted_inter_document": (1145, 0, 3, 259),
    "stable_mask": (423, 0, 2, 259),
    "stack": (1417, 0, 3, 471),
}
"""Calls, reads and uploads of the prompt; calls of a token, which takes one read and no upload."""


def test_every_method_has_a_bound():
    assert set(BOUNDS) == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_asks_the_device_no_more_often_than_before(on_twin, name):
    counts = on_twin(count_method, name, LAYERS)
    prompt_calls, reads, uploads, step_calls = BOUNDS[name]
    assert counts["prompt"]["calls"] <= prompt_calls
    assert counts["prompt"]["reads"] <= reads
    assert counts["prompt"]["uploads"] <= uploads
    assert counts["step"]["calls"] <= step_calls
    assert (counts["step"]["reads"], counts["step"]["uploads"]) == (1, 0)
