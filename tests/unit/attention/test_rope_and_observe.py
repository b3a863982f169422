"""Rotation against transformers' own, and the attention that is reported against a plain softmax."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rag_posfix.attention.masks import head_attention, last_query_attention
from rag_posfix.attention.rope import add_rotation, rotate_half_split


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def test_rotating_a_quarter_turn_by_hand():
    # D = 4 pairs channels (0, 2) and (1, 3). A quarter turn takes (x1, x2) to (-x2, x1).
    states = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    turned = rotate_half_split(states, torch.zeros(4), torch.ones(4))
    assert turned.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]


def test_it_is_the_rotation_of_llama(generator):
    query, key = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (3, 1))
    angle = torch.rand(2, 5, 4, generator=generator).repeat(1, 1, 2)
    expected, _ = apply_rotary_pos_emb(query, key, angle.cos(), angle.sin())
    assert torch.equal(rotate_half_split(query, angle.cos()[:, None], angle.sin()[:, None]), expected)


def test_channels_beyond_the_rotated_ones_pass(generator):
    states = torch.randn(1, 1, 2, 8, generator=generator)
    turned = rotate_half_split(states, torch.zeros(4), torch.ones(4))
    assert torch.equal(turned[..., 4:], states[..., 4:])


def test_several_rotations_of_one_vector_add_up(generator):
    states = torch.randn(3, 5, 8, generator=generator)
    first, second = (angle.repeat(1, 1, 1, 2) for angle in torch.rand(2, 2, 1, 5, 3, generator=generator))  # 6 of 8
    turned = rotate_half_split(rotate_half_split(states, first.cos(), first.sin()), second.cos(), second.sin())
    expected = rotate_half_split(states, (first + second).cos(), (first + second).sin())
    assert expected.shape == (2, 3, 5, 8)
    torch.testing.assert_close(turned, expected, atol=1e-6, rtol=0)


def test_attention_of_the_last_query_by_hand():
    # One head, two keys with scores 0 and ln 3: shares 1/4 and 3/4.
    query = torch.tensor([[0.0, 0.0], [1.0, 0.0]]).view(1, 1, 2, 2)
    key = torch.tensor([[0.0, 5.0], [math.log(3), -2.0]]).view(1, 1, 2, 2)
    assert last_query_attention(query, key, None, 1.0).tolist() == [pytest.approx([0.25, 0.75])]


def test_attention_by_head_reads_the_key_head_of_the_group():
    # Queries of four heads, all (1, 0); keys of head 0 score 0 and ln 3, of head 1 ln 3 and 0: query heads 0 and 1
    # have shares 1/4 and 3/4, 2 and 3 have 3/4 and 1/4.
    query = torch.tensor([1.0, 0.0]).expand(1, 4, 1, 2)
    key = torch.tensor([[[0.0, 5.0], [math.log(3), -2.0]], [[math.log(3), 1.0], [0.0, 4.0]]])[None]
    (found,) = head_attention(query, key, None, 1.0, (3, 1, 2, 0)).tolist()
    first, second = pytest.approx([0.25, 0.75]), pytest.approx([0.75, 0.25])
    assert found == [second, first, second, first]


def test_the_turn_of_a_key_head_is_that_of_the_query_heads_of_its_group():
    # Two key heads turn by a quarter, (x1, x2) -> (-x2, x1), and by a half, (-x1, -x2); four query heads.
    states = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]).view(1, 4, 1, 2)
    turned = add_rotation(states, torch.tensor([1j, -1.0], dtype=torch.complex64).view(1, 2, 1, 1))
    assert turned.view(4, 2).tolist() == [[-2.0, 1.0], [-4.0, 3.0], [-5.0, -6.0], [-7.0, -8.0]]


@pytest.mark.parametrize("additive", [False, True])
def test_a_masked_key_gets_no_attention(additive, generator):
    query, key = torch.randn(1, 4, 3, 8, generator=generator), torch.randn(1, 2, 5, 8, generator=generator)
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    mask[..., 1] = False
    given = torch.zeros(1, 1, 3, 5).masked_fill(~mask, float("-inf")) if additive else mask
    found = last_query_attention(query, key, given, 8**-0.5)
    assert found[0, 1] == 0
    assert float(found.sum()) == pytest.approx(1.0)
