import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.reranking.relevance import shares, sigmoid, standing

RAW = st.lists(st.floats(-1e6, 1e6), max_size=30)


def test_sigmoid_by_hand_and_without_overflow():
    assert sigmoid(0.0) == 0.5
    assert sigmoid(math.log(3)) == pytest.approx(0.75)
    assert (sigmoid(-1000.0), sigmoid(1000.0)) == (0.0, 1.0)
    assert math.isnan(sigmoid(math.nan))


def test_standing_by_hand():
    # mean 2, population deviation sqrt((1 + 0 + 1) / 3)
    z = 1 / math.sqrt(2 / 3)
    assert standing([1.0, 2.0, 3.0]) == pytest.approx([1 / (1 + math.exp(z)), 0.5, 1 / (1 + math.exp(-z))])
    assert standing([4.0]) == [0.5]
    assert standing([-4.0, -4.0]) == [0.5, 0.5]
    assert standing([]) == []


def test_shares_by_hand():
    assert shares([1.0, 3.0]) == [0.25, 0.75]
    assert shares([0.0, 0.0]) == [0.5, 0.5]
    assert shares([]) == []


@given(RAW)
def test_standing_keeps_the_order_and_stays_in_range(raw):
    found = standing(raw)
    assert all(0.0 <= score <= 1.0 for score in found)
    for a, x in zip(raw, found, strict=True):
        for b, y in zip(raw, found, strict=True):
            assert x <= y if a < b else True
            assert x == y if a == b else True


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_shares_stay_in_range(raw):
    assert all(0.0 <= share <= 1.0 for share in shares(raw))
