import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.reranking.base import sigmoid, sigmoid_of_z_scores, sum_normalized, z_scores


def test_sigmoid_by_hand_and_without_overflow():
    assert sigmoid(0.0) == 0.5
    assert sigmoid(math.log(3)) == pytest.approx(0.75)
    assert (sigmoid(-1000.0), sigmoid(1000.0)) == (0.0, 1.0)
    assert math.isnan(sigmoid(math.nan))


def test_sigmoid_of_z_scores_by_hand():
    # mean 2, population deviation sqrt((1 + 0 + 1) / 3)
    z = 1 / math.sqrt(2 / 3)
    assert sigmoid_of_z_scores([1.0, 2.0, 3.0]) == pytest.approx([1 / (1 + math.exp(z)), 0.5, 1 / (1 + math.exp(-z))])
    assert sigmoid_of_z_scores([4.0]) == [0.5]
    assert sigmoid_of_z_scores([-4.0, -4.0]) == [0.5, 0.5]
    assert sigmoid_of_z_scores([]) == []


@pytest.mark.parametrize("count", range(2, 12))
@pytest.mark.parametrize("value", [0.1, 0.2, 0.7, 0.9, -0.3, 0.23308445025757263])
def test_equal_scores_are_each_the_mean_whatever_their_mean_rounds_to(value, count):
    # The mean of three times .1 is .10000000000000002 or .09999999999999999 in floats, and not .1.
    assert z_scores([value] * count) == [0.0] * count


def test_scores_that_differ_by_rounding_alone_are_equal():
    assert z_scores([0.3, 0.1 + 0.2, 0.3]) == [0.0, 0.0, 0.0]  # .1 + .2 = .30000000000000004
    # Deviations of 1/2 and 2 millionths of the larger: rounding of float32, and more than that.
    assert z_scores([1.0, 1.0 - 1e-6]) == [0.0, 0.0]
    assert z_scores([1.0, 1.0 - 4e-6]) == pytest.approx([1.0, -1.0])
    assert z_scores([-1e-9, 1e-9]) == pytest.approx([-1.0, 1.0])  # small is not rounding


def test_the_order_of_the_list_changes_no_digit():
    raw = [0.1, 0.7, 0.3, 0.9, 1e-9, 0.123456789, 0.7000001]
    for normalize in (z_scores, sigmoid_of_z_scores, sum_normalized):
        expected = dict(zip(raw, normalize(raw), strict=True))
        for some in itertools.islice(itertools.permutations(raw), 0, None, 97):
            assert dict(zip(some, normalize(some), strict=True)) == expected


def test_sum_normalized_by_hand():
    assert sum_normalized([1.0, 3.0]) == [0.25, 0.75]
    assert sum_normalized([0.0, 0.0]) == [0.5, 0.5]
    assert sum_normalized([]) == []


@given(st.lists(st.floats(0, 1e6), max_size=30), st.sampled_from([sigmoid_of_z_scores, sum_normalized]))
def test_normalized_scores_keep_the_order_and_stay_in_range(raw, normalize):
    found = normalize(raw)
    assert all(0.0 <= score <= 1.0 for score in found)
    ascending = sorted(zip(raw, found, strict=True))
    assert [score for _, score in ascending] == sorted(found)
    assert len({score for value, score in ascending if value == ascending[0][0]}) == (1 if raw else 0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_negative_scores_keep_their_order(raw):
    ascending = sorted(zip(raw, sigmoid_of_z_scores(raw), strict=True))
    assert [score for _, score in ascending] == sorted(score for _, score in ascending)


def test_sigmoid_never_decreases():
    values = sorted(
        {sign * step * 2.0**-52 + base for base in (-3.7, -0.9) for step in range(400) for sign in (1, -1)}
    )
    scores = [sigmoid(value) for value in values]
    assert scores == sorted(scores)
