"""Position-awareness and the divisors of head_scaling, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rag_posfix.errors import ConfigError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from rag_posfix.mitigations.head_scaling import divisors, position_awareness
from tests.support.tiny import COMMON, loaded_model, toy_layout

# D = 1, so that scores are q k. A key of log(n) is n times as likely as a key of 0 for a query of 1.
KEYS = [0.0, 0.0, 0.0, math.log(5)]  # attention of a query of 1: 1/8, 1/8, 1/8, 5/8; the mean is 1/4


def states(*heads):
    """(1, H, T, 1) of one list per head."""
    return torch.tensor(heads)[None, :, :, None]


@pytest.mark.parametrize(
    ("query", "alpha", "share"),
    [
        (1.0, 2.0, 1 / 4),  # 5/8 >= 2/4: one of four keys
        (1.0, 2.6, 0.0),  # 5/8 < 2.6/4
        (1.0, 0.5, 1.0),  # 1/8 >= 0.5/4: all, equality counts
        (-1.0, 1.0, 3 / 4),  # attention 5/16, 5/16, 5/16, 1/16: three reach the mean
        (-1.0, 1.3, 0.0),  # 5/16 < 1.3/4
    ],
)
def test_awareness_is_the_share_of_keys_that_reach_alpha_times_the_mean_attention(query, alpha, share):
    assert position_awareness(states([query]), states(KEYS), alpha).tolist() == [share]


def test_scores_are_divided_by_the_root_of_the_head_size():
    # D = 4, q = (2, 0, 0, 0), k = (log 5, 0, 0, 0): q k / 2 = log 5, so that 5/8 of the attention is on it.
    key = torch.zeros(1, 1, 4, 4)
    key[0, 0, 3, 0] = math.log(5)
    query = torch.tensor([2.0, 0, 0, 0])[None, None, None]
    assert position_awareness(query, key, 2.49).tolist() == [0.25]
    assert position_awareness(query, key, 2.51).tolist() == [0.0]


def test_query_heads_that_share_a_key_head_count_with_their_mean():
    # Key head 0 with queries 1 and -1 at alpha 1: 1/4 and 3/4; key head 1 with queries 0 (all alike: 1) and 1 (1/4).
    query = states([1.0], [-1.0], [0.0], [1.0])
    assert position_awareness(query, states(KEYS, KEYS), 1.0).tolist() == [0.5, 0.625]


def test_the_most_aware_head_gets_the_lowest_divisor_and_the_least_aware_the_highest():
    # Awareness .1 .5 .3: ranks 2, 0, 1 of n = 3: 1.2 + rank * 0.3. The heads in order are 1, 2, 0; with that list in
    # the place of the ranks (the inverse permutation) head 0 would get 1.5 and head 2 1.2.
    found = divisors(torch.tensor([0.1, 0.5, 0.3]), 1.2, 1.8)
    assert found.tolist() == pytest.approx([1.8, 1.2, 1.5])
    order = torch.tensor([0.1, 0.5, 0.3]).argsort(descending=True)
    assert (1.2 + order * 0.3).tolist() == pytest.approx([1.5, 1.8, 1.2]), "the two differ in this case"


def test_the_divisors_are_evenly_spaced_from_low_to_high():
    # n = 4: 1, 1 + 0.6/3, 1 + 1.2/3, 1.6.
    assert divisors(torch.tensor([4.0, 3.0, 2.0, 1.0]), 1.0, 1.6).tolist() == pytest.approx([1.0, 1.2, 1.4, 1.6])


def test_heads_alike_are_ranked_in_their_own_order():
    assert divisors(torch.tensor([0.2] * 3), 1.0, 2.0).tolist() == [1.0, 1.5, 2.0]
    many = divisors(torch.tensor([0.2] * 100), 0.0, 99.0)
    assert many.tolist() == pytest.approx(list(range(100)))


def test_a_single_key_head_gets_the_mean():
    assert divisors(torch.tensor([0.3]), 1.2, 1.8).tolist() == [1.5]


def decided(n_kv_heads=2, **parameters):
    """Read a prompt and return the session's divisors by layer."""
    loaded = loaded_model(num_key_value_heads=n_kv_heads, num_hidden_layers=4)
    layout = toy_layout()
    running = Session(loaded, layout, create("head_scaling", parameters).plan(layout, loaded.spec.shape))
    (batch,) = running.batches
    return running, batch.layer_state.head_divisors


def test_the_first_layers_are_left_alone():
    _, ratios = decided(skip_layers=3)
    assert [layer for layer, found in ratios.items() if found is not None] == [3]
    assert sorted(decided(skip_layers=0)[1][0].tolist()) == pytest.approx([1.2, 1.8])


@pytest.mark.parametrize("n_kv_heads", [1, 4, 8])
def test_every_number_of_key_heads_is_served(n_kv_heads):
    running, ratios = decided(n_kv_heads)
    expected = [1.5] if n_kv_heads == 1 else torch.linspace(1.2, 1.8, n_kv_heads).tolist()
    assert sorted(ratios[2].tolist()) == pytest.approx(expected)
    running.advance(5)
    assert torch.isfinite(running.next_log_probs()).all()


def test_three_key_heads_of_nine_are_served():
    loaded = loaded_model(hidden_size=72, num_attention_heads=9, num_key_value_heads=3)
    assert COMMON["num_hidden_layers"] == 3
    layout = toy_layout()
    running = Session(loaded, layout, create("head_scaling").plan(layout, loaded.spec.shape))
    (batch,) = running.batches
    assert sorted(batch.layer_state.head_divisors[2].tolist()) == pytest.approx([1.2, 1.5, 1.8])


def test_alpha_low_and_high_reach_the_divisors():
    # One query head to each key head, -1 and 1. alpha 1: awareness 3/4 and 1/4; alpha 2: 0 and 1/4.
    query, key = states([-1.0], [1.0]), states(KEYS, KEYS)
    shape = loaded_model().spec.shape
    for parameters, expected in (
        ({"alpha": 1.0, "low": 1.0, "high": 3.0}, [1.0, 3.0]),
        ({"alpha": 2.0, "low": 1.0, "high": 3.0}, [3.0, 1.0]),
        ({"alpha": 2.0, "low": 1.5, "high": 1.5}, [1.5, 1.5]),
    ):
        (row,) = create("head_scaling", {**parameters, "skip_layers": 1}).plan(toy_layout(), shape).rows
        assert row.head_scale(0, query, key) is None
        assert row.head_scale(1, query, key).tolist() == expected


def test_divisors_are_decided_from_the_prompt_and_kept():
    running, before = decided()
    before = {layer: None if found is None else found.clone() for layer, found in before.items()}
    for token in (5, 9, 11):
        running.advance(token)
    (batch,) = running.batches
    assert batch.layer_state.head_divisors.keys() == before.keys()
    assert all(torch.equal(batch.layer_state.head_divisors[layer], before[layer]) for layer in (2, 3))


def test_the_smaller_divisor_comes_first():
    with pytest.raises(ConfigError, match=r"low=1\.9 must not exceed high=1\.8"):
        create("head_scaling", {"low": 1.9})
