"""Attention spelled out piece by piece, against attention in double precision."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.attention import causal
from rag_posfix.attention.causal import attend_causal_fast, attend_causal_tiled


def states(n_query, n_key, batch=2, heads=6, kv_heads=2, size=8):
    generator = torch.Generator().manual_seed(n_query)
    shapes = (batch, heads, n_query, size), (batch, kv_heads, n_key, size), (batch, kv_heads, n_key, size)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def exact(query, key, value, scaling):
    """Return causal attention of the newest tokens, in the dtype given."""
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ value


def by_key_head(query, key, value):
    return query.reshape(-1, query.shape[1] // key.shape[1], *query.shape[2:]), key.flatten(0, 1), value.flatten(0, 1)


def test_a_token_sees_what_stood_before_it_and_itself():
    # Scores 0: everything that is seen counts alike. Keys 0, 3, 6, 9; two new tokens: (0+3+6)/3 and (0+3+6+9)/4.
    value = torch.tensor([0.0, 3.0, 6.0, 9.0])[None, :, None]
    out = attend_causal_tiled(torch.zeros(1, 1, 2, 1), torch.ones(1, 4, 1), value, 1.0)
    assert out.flatten().tolist() == pytest.approx([3.0, 4.5])


@pytest.mark.parametrize("most", [1, 40, 200, 10**6])
@pytest.mark.parametrize(("n_query", "n_key"), [(7, 20), (20, 20), (1, 5)])
def test_tiles_of_any_size_are_causal_attention(n_query, n_key, most, monkeypatch):
    monkeypatch.setattr(causal, "TILE_SCORES", most)
    given = states(n_query, n_key)
    out = attend_causal_tiled(*by_key_head(*given), 0.3).view(given[0].shape)
    torch.testing.assert_close(out, exact(*given, 0.3), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("n_query", "n_key"), [(7, 20), (20, 20), (1, 5), (0, 5)])
def test_in_float32_it_is_causal_attention_of_the_newest_tokens(n_query, n_key):
    given = states(n_query, n_key)
    out = attend_causal_fast(*(part.float() for part in given), 0.3)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, exact(*given, 0.3).float(), atol=1e-5, rtol=0)


def test_bfloat16_scores_cost_a_few_times_what_rounding_queries_and_keys_cost_already():
    query, key, value = states(150, 900, batch=1, size=64)
    value = value.bfloat16()
    request = exact(query, key, value.double(), 0.3)  # scores of about -10 to 10
    rounded = exact(query.bfloat16().double(), key.bfloat16().double(), value.double(), 0.3)
    found = attend_causal_fast(query.bfloat16(), key.bfloat16(), value, 0.3)
    assert found.dtype is torch.bfloat16
    inputs, scores = (float((a.double() - b).norm()) for a, b in ((rounded, request), (found, rounded)))
    assert scores < 3 * inputs


@pytest.mark.parametrize(
    "sizes", [(3, 3, 150, 3040), (8, 4, 1, 10**7), (2, 1, 5, 7), (8, 4, 3000, 20000), (2, 2, 0, 9)]
)
def test_tiles_cover_everything_once_and_are_bounded(sizes):
    n_key_heads, groups, n_query, n_key = sizes
    covered = torch.zeros(n_key_heads, n_query, dtype=torch.int)
    for heads, rows in causal.tiles(*sizes):
        covered[heads, rows] += 1
        count = (heads.stop - heads.start) * (rows.stop - rows.start)
        assert count == 1 or count * groups * n_key <= causal.TILE_SCORES
    assert (covered == 1).all()
