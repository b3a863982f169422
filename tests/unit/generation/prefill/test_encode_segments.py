"""Passages are encoded in few passes with little padding, and without the output of the last layer."""

import itertools
import random

import pytest
import torch

from rag_posfix.generation.prefill.per_passage import (
    BATCH_TOKENS,
    PASS_TOKENS,
    Segment,
    encode_segments,
    group_by_width,
)
from rag_posfix.patching.attention_hook import Overrides
from tests.support.tiny import loaded_model


def cost(groups, widths):
    return sum(len(group) * widths[group[0]] + PASS_TOKENS for group in groups)


@pytest.mark.parametrize(
    ("widths", "equal_only", "expected"),
    [
        ([], False, []),
        ([160] * 20, False, [[160] * 20]),
        ([160, 144, 160], False, [[160, 160, 144]]),
        ([160, 144, 160], True, [[160, 160], [144]]),
        ([64] * 19 + [1024], False, [[1024], [64] * 19]),
        ([4096, 4096, 4096], False, [[4096], [4096, 4096]]),
        ([BATCH_TOKENS + 16, 16], False, [[BATCH_TOKENS + 16], [16]]),
    ],
)
def test_segments_of_similar_width_share_a_pass(widths, equal_only, expected):
    groups = group_by_width(widths, equal_only=equal_only)
    assert sorted(index for group in groups for index in group) == list(range(len(widths)))
    assert sorted([widths[index] for index in group] for group in groups) == sorted(expected)


def test_no_other_groups_of_neighbours_cost_less():
    numbers = random.Random(0)
    for _ in range(20):
        widths = [16 * numbers.randint(1, 40) for _ in range(6)]
        order = sorted(range(6), key=lambda index: -widths[index])
        cuts = itertools.chain.from_iterable(itertools.combinations(range(1, 6), count) for count in range(6))
        partitions = [[order[a:b] for a, b in itertools.pairwise((0, *some, 6))] for some in cuts]
        assert cost(group_by_width(widths), widths) == min(cost(groups, widths) for groups in partitions)


def test_each_segment_has_the_keys_of_the_stock_model_and_the_last_perceptron_does_not_run():
    loaded, read = loaded_model(max_position_embeddings=2048), []
    handles = [
        layer.mlp.register_forward_hook(lambda module, arguments, output, number=number: read.append(number))
        for number, layer in enumerate(loaded.model.model.layers)
    ]
    segments = [Segment(tuple(range(3, 3 + n)), torch.arange(n, dtype=torch.float32)) for n in (5, 90, 33, 40)]
    encoded = encode_segments(loaded, segments, None, Overrides())
    for handle in handles:
        handle.remove()
    assert read == [*range(len(handles) - 1)] * 2, "one of 96 tokens, and three of up to 48"
    for segment, kv in zip(segments, encoded, strict=True):
        cache = loaded.model(torch.tensor([segment.token_ids]), use_cache=True).past_key_values
        expected = torch.stack(
            [torch.stack([getattr(layer, half)[0] for layer in cache.layers]) for half in ("keys", "values")]
        )
        assert torch.allclose(kv, expected, atol=1e-5)
