import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.attention.masks import LSE_KERNELS, attend_causal, attend_causal_rows, runs, scores, weigh


def states(rows, n_query, n_key, groups=3, n_kv=2, channels=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, groups * n_kv, n_query, channels, generator=generator)
    key, value = (torch.randn(rows, n_kv, n_key, channels, generator=generator) for _ in range(2))
    return query, key, value


def plain(query, key, value, scaling, start=0):
    """Return attention spelled out: the queries are the newest tokens, and none sees a key before ``start``."""
    n_query, n_key = query.shape[2], key.shape[2]
    at = torch.arange(n_key)
    mask = (at[None] <= at[n_key - n_query :, None]) & (at >= start)
    spelled = scores(query, key, scaling).masked_fill(~mask, float("-inf"))
    return weigh(spelled.softmax(dim=-1), value)


@pytest.mark.parametrize(("n_query", "n_key"), [(1, 1), (1, 40), (7, 7), (5, 40), (40, 41), (300, 700)])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_newest_tokens_see_all_before_them(n_query, n_key, groups):
    query, key, value = states(2, n_query, n_key, groups)
    assert torch.allclose(attend_causal(query, key, value, 0.3), plain(query, key, value, 0.3), atol=1e-5)


def test_they_see_the_same_on_a_device_whose_kernels_return_no_log_sum_exp(monkeypatch):
    monkeypatch.delitem(LSE_KERNELS, "cpu")
    query, key, value = states(2, 5, 40)
    assert torch.allclose(attend_causal(query, key, value, 0.3), plain(query, key, value, 0.3), atol=1e-5)


def test_a_whole_prompt_is_computed_by_the_call_of_transformers():
    query, key, value = states(1, 33, 33)
    stock = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    assert torch.equal(attend_causal(query, key, value, 0.3), stock)


@given(starts=st.lists(st.integers(0, 9), min_size=1, max_size=6), n_query=st.integers(1, 4))
def test_no_row_sees_what_stands_before_its_start(starts, n_query):
    query, key, value = states(len(starts), n_query, 10 + n_query)
    key[:, :, :1] = 50.0  # would draw all attention of a row that starts later
    expected = torch.cat(
        [
            plain(query[r : r + 1], key[r : r + 1], value[r : r + 1], 0.3, start)
            for r, start in enumerate(starts)
        ]
    )  # fmt: skip
    assert torch.allclose(attend_causal_rows(query, key, value, 0.3, starts), expected, atol=1e-5)


def test_neighbours_with_equal_starts_share_a_call():
    assert list(runs([3, 3, 0, 3])) == [(slice(0, 2), 3), (slice(2, 3), 0), (slice(3, 4), 3)]
