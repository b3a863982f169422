import pytest

from benchmarks import roofline
from benchmarks.roofline import Machine, Shape, Work, prompt_work, score_pairs, step_work

TINY = Shape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, inner=8, vocabulary=10)


def test_weights_by_hand():
    # q and o 4 x 4, k and v 4 x 2: 48; three matrices of 4 x 8: 96. Two layers and 10 x 4 of the vocabulary.
    assert TINY.layer_weights == 48 + 96
    assert TINY.weights == 2 * 144 + 40


def test_pairs_by_hand(monkeypatch):
    # 4 tokens around 2 passages of 3: 10 x 10 / 2 = 50 causal pairs; 3 x 3 x 2 = 18 between passages.
    monkeypatch.setattr(roofline, "PREFIX_AND_SUFFIX", 4)
    pairs = {method: score_pairs(method, 2, 3) for method in roofline.METHODS}
    assert pairs == {
        "stock": 50, "none": 50, "parallel_encoding": 41, "sorted_inter_document": 59, "inter_document": 77,
    }  # fmt: skip


def test_the_slowest_of_the_three_is_the_bound():
    machine = Machine("by hand", flops=10.0, bandwidth=5.0, call=0.5)
    assert Work(flops=30, moved_bytes=10, calls=4).bound(machine) == 3.0
    assert Work(flops=30, moved_bytes=20, calls=4).bound(machine) == 4.0
    assert Work(flops=30, moved_bytes=20, calls=10).bound(machine) == 5.0


def test_prompt_and_step_by_hand(monkeypatch):
    monkeypatch.setattr(roofline, "PREFIX_AND_SUFFIX", 4)
    prompt = prompt_work(TINY, "stock", 2, 3, calls=60)
    assert (prompt.flops, prompt.calls) == (2 * (2 * 10 * 144 + 4 * 50 * 4), 120)
    step = step_work(TINY, "stock", 2, 3, calls=60)  # weights once; keys and values of 10 tokens, 2 channels, 2 bytes
    assert step.moved_bytes == pytest.approx(2 * 328 + 2 * 2 * 2 * 10 * 2)
    assert step_work(TINY, "inter_document", 2, 3, 60).moved_bytes > step.moved_bytes
