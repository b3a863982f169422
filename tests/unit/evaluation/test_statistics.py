import numpy as np
import pytest

from rag_posfix.evaluation.statistics import bootstrap_interval, mean


def test_the_mean_of_nothing_is_zero():
    assert mean([]) == 0.0
    assert mean([1, 2, 6]) == 3.0


def test_rows_that_are_all_alike_have_no_spread():
    assert bootstrap_interval([[0.25, 0.5]] * 9, min) == (0.25, 0.25)


def test_the_interval_of_one_row_is_its_value():
    assert bootstrap_interval([[1.0, 4.0]], mean) == (2.5, 2.5)


def test_the_interval_of_a_proportion_is_that_of_the_binomial():
    # 50 of 100 right: the mean of 100 draws has a standard deviation of 0.05, so 95 % lie within 0.5 +- 0.098.
    low, high = bootstrap_interval([[1.0], [0.0]] * 50, mean)
    assert low == pytest.approx(0.402, abs=0.011)
    assert high == pytest.approx(0.598, abs=0.011)


def test_the_same_seed_gives_the_same_interval():
    rows = [[float(i % 3), float(i % 5)] for i in range(20)]
    assert bootstrap_interval(rows, mean) == bootstrap_interval(rows, mean)
    assert bootstrap_interval(rows, mean) != bootstrap_interval(rows, mean, seed=1)


def test_rows_are_resampled_whole_so_that_conditions_stay_paired():
    # The second condition is always 0.5 better, however different the questions are.
    rows = [[i, i + 0.5] for i in range(40)]
    assert bootstrap_interval(rows, lambda means: means[1] - means[0]) == pytest.approx((0.5, 0.5))


def test_no_global_random_state_is_touched():
    before = np.random.get_state()[1].tolist()
    bootstrap_interval([[1.0], [0.0]], mean)
    assert np.random.get_state()[1].tolist() == before
