"""Snapshots of caches: what comes back, how rows are joined, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from rag_posfix.patching.snapshots import SnapshotError, SnapshotForm

WINDOW = 4


def cache_of(n_tokens: int, start: float = 0.0) -> Cache:
    """A cache of one row with a layer of each kind, after ``n_tokens``, whose numbers count from ``start``."""
    layers = [DynamicLayer(), DynamicSlidingWindowLayer(WINDOW), LinearAttentionLayer(2),
              LinearAttentionAndFullAttentionLayer()]  # fmt: skip
    cache = Cache(layers=layers)
    for index in (0, 1, 3):
        keys = start + torch.arange(2.0 * n_tokens).reshape(1, 1, n_tokens, 2)
        cache.update(keys, -keys, index)
    for index in (2, 3):
        cache.update_conv_state(torch.full((1, 3, 2), start), index)
        cache.update_recurrent_state(torch.full((1, 2, 2), start, dtype=torch.float64), index)
    return cache


def test_every_tensor_and_number_comes_back_and_shares_no_memory() -> None:
    cache = cache_of(6, 1.0)
    form = SnapshotForm.of(cache)
    saved = form.save(cache)
    assert (saved.dtype, saved.ndim) == (torch.uint8, 1)
    for _ in range(2):
        filled = form.fill([saved])
        assert torch.equal(filled.layers[0].keys, cache.layers[0].keys)
        assert filled.layers[1].keys.shape[2] == WINDOW - 1  # the window drops the others
        assert filled.layers[1].cumulative_length == 6
        assert filled.get_seq_length() == 6
        assert torch.equal(filled.layers[2].recurrent_states[0], cache.layers[2].recurrent_states[0])
        assert filled.layers[2].recurrent_states[1] is None
        assert filled.has_previous_state(2, 0)
        filled.update_recurrent_state(torch.zeros(1, 2, 2, dtype=torch.float64), 2)  # written in place
        filled.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), 0)
    assert cache.layers[2].recurrent_states[0].sum() == 4


def test_a_new_cache_of_the_same_kind_has_no_numbers_of_the_one_it_was_made_from() -> None:
    form = SnapshotForm.of(cache_of(6))
    assert all(layer.keys is None for layer in form.template.layers if isinstance(layer, DynamicLayer))
    assert form.name == SnapshotForm.of(cache_of(3)).name
    assert form.name != SnapshotForm.of(DynamicCache(ddp_cache_data=[(torch.zeros(1, 1, 2, 2),) * 2])).name


def test_shorter_rows_are_padded_in_front() -> None:
    longer, shorter = cache_of(6), cache_of(2, 100.0)
    form = SnapshotForm.of(longer)
    joined = form.join([longer, shorter])
    # Six tokens and two: four tokens of padding. Of the window three are kept: one of padding before two.
    assert joined.layers[0].keys[1, 0, :, 0].tolist() == [0, 0, 0, 0, 100, 102]
    assert joined.layers[1].keys[:, 0, :, 0].tolist() == [[6, 8, 10], [0, 100, 102]]
    assert joined.layers[1].cumulative_length == 6
    assert joined.layers[2].recurrent_states[0][:, 0, 0].tolist() == [0, 100]
    filled = form.fill([form.save(longer), form.save(shorter)])
    assert torch.equal(filled.layers[3].keys, joined.layers[3].keys)


def test_keys_that_are_the_values_are_saved_once() -> None:
    cache = cache_of(600)
    separate = len(SnapshotForm.of(cache).save(cache))
    cache.layers[0].values = cache.layers[0].keys
    # Keys of 600 tokens and 2 channels in float32.
    assert separate - len(SnapshotForm.of(cache).save(cache)) == pytest.approx(600 * 2 * 4, abs=64)


def test_what_is_no_cache_of_layers_is_refused() -> None:
    for held in (None, [torch.zeros(1)], Cache(layers=[DynamicLayer()]).layers):
        with pytest.raises(SnapshotError, match="no layers"):
            SnapshotForm.of(held)


@pytest.mark.parametrize("change", ["layers", "shorter", "attribute", "type", "json", "length", "empty"])
def test_bytes_that_are_no_snapshot_of_the_cache_are_refused(change: str) -> None:
    cache = cache_of(3)
    form = SnapshotForm.of(cache)
    data = bytearray(form.save(cache).numpy().tobytes())
    end = 16 + int.from_bytes(data[:16], "little")
    header = json.loads(data[16:end])
    match change:
        case "layers":
            header["layers"].pop()
        case "attribute":
            header["layers"][0][0][0] = "__class__"
        case "type":
            header["tensors"][0][0] = "float4"
        case "length":
            header["tensors"][0][1] = [1, 1, 10**9, 2]
    text = b"[" if change == "json" else json.dumps(header).encode()
    data = bytearray(len(text).to_bytes(16, "little") + text) + data[end:]
    data = data[:-200] if change == "shorter" else data[: 0 if change == "empty" else None]
    with pytest.raises(SnapshotError):
        form.fill([torch.tensor(list(data), dtype=torch.uint8)])
