"""What a method asks of the device does not grow: calls and waits of a prompt and of a token after it.

Numbers are those of ``python -m benchmarks.device_calls --layers 3``: eight passages of 40 tokens. Lower a bound that
is not reached any more.
"""

import pytest

from benchmarks.device_calls import METHODS, count_method

LAYERS = 3
BOUNDS = {
    "stock": (187, 0, 1, 179),
    "none": (289, 0, 2, 203),
    "default": (1228, 0, 10, 257),
    "blended": (1571, 1, 12, 203),
    "calibrated_attention": (3555, 1, 22, 259),
    "canonical_rotations": (2264, 0, 17, 490),
    "committee": (1532, 0, 13, 323),
    "context_experts": (1222, 0, 9, 253),
    "head_scaling": (465, 0, 2, 358),
    "hidden_scaling": (562, 0, 2, 386),
    "inter_document": (1824, 0, 6, 611),
    "layer_scaling": (331, 0, 2, 245),
    "multi_base": (963, 0, 6, 409),
    "parallel_encoding": (1072, 0, 8, 290),
    "parallel_windows": (964, 0, 8, 203),
    "repeated_passages": (333, 0, 2, 203),
    "passage_answers": (9470, 25, 14, 210),
    "set_prompting": (964, 0, 8, 203),
    "shifted_rotary": (295, 0, 2, 209),
    "sorted_inter_document": (882, 0, 3, 203),
    "stable_mask": (340, 0, 2, 203),
    "stack": (1068, 0, 3, 358),
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
