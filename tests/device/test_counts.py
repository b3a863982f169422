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
    "default": (1201, 0, 10, 257),
    "blended": (1539, 1, 12, 203),
    "calibrated_attention": (3555, 1, 22, 259),
    "canonical_rotations": (2264, 0, 17, 490),
    "committee": (1502, 0, 13, 320),
    "context_experts": (1222, 0, 9, 253),
    "head_scaling": (453, 0, 2, 346),
    "hidden_scaling": (542, 0, 2, 374),
    "inter_document": (871, 0, 4, 407),
    "layer_scaling": (331, 0, 2, 245),
    "multi_base": (963, 0, 6, 409),
    "parallel_encoding": (1042, 0, 8, 257),
    "parallel_windows": (964, 0, 8, 203),
    "repeated_passages": (333, 0, 2, 203),
    "passage_answers": (9470, 25, 14, 210),
    "set_prompting": (964, 0, 8, 203),
    "shifted_rotary": (295, 0, 2, 209),
    "sorted_inter_document": (690, 0, 3, 203),
    "stable_mask": (340, 0, 2, 203),
    "stack": (864, 0, 3, 346),
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


@pytest.mark.parametrize(("name", "times"), [("sorted_inter_document", 4), ("inter_document", 5)])
def test_attention_without_order_costs_a_few_times_the_calls_of_a_plain_prompt(name, times):
    assert BOUNDS[name][0] <= times * BOUNDS["stock"][0]
