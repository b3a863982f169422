"""Bytes of snapshots of published models."""

import pytest

from benchmarks.snapshots import published_bytes


@pytest.mark.slow
def test_bytes_of_a_published_hybrid_are_those_of_its_states_and_keys():
    few, many = published_bytes("Qwen/Qwen3.5-0.8B")
    # 18 recurrent layers: float32 states of 16 heads of 128 x 128, and bfloat16 convolutions of 2 x 2,048 + 2,048
    # channels of 4 tokens. 6 layers with 2 heads of 256 channels: keys and values.
    states, convolutions, keys = 18 * 16 * 128 * 128 * 4, 18 * 6144 * 4 * 2, 6 * 2 * 2 * 256 * 2
    assert few == pytest.approx(states + convolutions + 128 * keys, rel=1e-3)
    assert many - few == pytest.approx(128 * keys, rel=1e-3)


@pytest.mark.slow
def test_bytes_of_a_published_model_with_windows_leave_out_layers_that_share_keys():
    few, many = published_bytes("google/gemma-4-E2B-it")
    # Of 35 layers the last 20 share keys: 12 with windows and 256 channels, 3 with 512, one head, bfloat16.
    assert many - few == pytest.approx(128 * 2 * 2 * (12 * 256 + 3 * 512), rel=1e-3)
