import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rag_posfix.evaluation.ranking.significance import (
    compare_all,
    difference_interval,
    holm,
    randomisation_p,
    t_test_p,
)


def test_p_is_the_share_of_sign_patterns_that_are_as_far_from_zero():
    # 1 + 1 + 1 = 3: of 8 patterns +++ and ---.
    assert randomisation_p([1.0, 1.0, 1.0]) == 0.25
    # 3 - 1 = 2: of +-3 +-1 the sums 4, 2, -2, -4 are all at least 2 away.
    assert randomisation_p([3.0, -1.0]) == 1.0
    # 0.3 + 0.2 - 0.1 = 0.4: 0.6, 0.4 and their mirrors are at least as far; 0.2 and 0 (and mirrors) are not.
    assert randomisation_p([0.3, 0.2, -0.1]) == 0.5


def test_differences_of_zero_say_nothing():
    assert randomisation_p([0.0, 0.0]) == 1.0
    assert randomisation_p([]) == 1.0
    assert randomisation_p([1.0, 0.0, 1.0, 0.0, 1.0]) == 0.25


@given(st.lists(st.sampled_from([-1.0, -0.5, -0.1, 0.1, 0.25, 1.0]), min_size=1, max_size=8))
def test_the_exact_p_is_that_of_counting_every_pattern(differences):
    size = abs(math.fsum(differences)) - 1e-9
    sums = [
        abs(math.fsum(sign * x for sign, x in zip(signs, differences, strict=True))) >= size
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    assert randomisation_p(differences) == pytest.approx(sum(sums) / len(sums))


def test_a_drawn_p_is_near_scipys_and_never_zero():
    differences = list(np.random.default_rng(1).normal(0.15, 1, size=60))
    theirs = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=20_000, rng=np.random.default_rng(2)
    ).pvalue
    assert randomisation_p(differences) == pytest.approx(theirs, abs=0.015)
    assert randomisation_p(differences) == randomisation_p(differences)
    assert randomisation_p([1.0] * 40) == pytest.approx(1 / 10_001)


def test_the_t_test_is_scipys():
    a, b = [0.2, 0.5, 0.9, 0.4], [0.1, 0.5, 0.3, 0.45]
    assert t_test_p([x - y for x, y in zip(a, b, strict=True)]) == pytest.approx(stats.ttest_rel(a, b).pvalue)


def test_the_t_test_has_an_answer_without_variance():
    assert t_test_p([0.0, 0.0]) == 1.0
    assert t_test_p([0.5]) == 1.0
    assert t_test_p([0.1, 0.1, 0.1]) == 0.0


def test_holm_is_the_one_of_the_textbook():
    # Sorted: .005 * 4 = .02; .01 * 3 = .03; .03 * 2 = .06; .04 * 1 = .04, raised to .06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_an_interval_holds_the_mean_and_is_a_point_where_nothing_varies():
    assert difference_interval([0.25] * 5) == (0.25, 0.25)
    low, high = difference_interval([0.0, 1.0] * 20)
    # Standard error sqrt(.25 / 40) = .079: about .5 +- .155.
    assert (low, high) == (pytest.approx(0.345, abs=0.03), pytest.approx(0.655, abs=0.03))


def test_every_run_is_compared_with_each_before_it_and_the_correction_is_over_all():
    values = {"first": [0.0] * 3, "a": [1.0] * 3, "b": [1.0, 1.0, 0.0]}
    found = {(one.a, one.b): one for one in compare_all("nDCG@10", values)}
    assert list(found) == [("a", "first"), ("b", "first"), ("b", "a")]
    assert found["a", "first"].difference == 1.0
    assert found["b", "a"].difference == pytest.approx(-1 / 3)
    assert (found["b", "a"].better, found["b", "a"].worse) == (0, 1)
    assert [one.p_randomisation for one in found.values()] == [0.25, 0.5, 1.0]
    assert [one.p_holm for one in found.values()] == [0.75, 1.0, 1.0]
