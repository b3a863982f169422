import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rag_posfix.evaluation.statistics import (
    bootstrap_interval,
    compare_all,
    difference_interval,
    holm,
    mcnemar_p,
    mean,
    overconfidence,
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


def test_overconfidence_is_mean_confidence_minus_accuracy():
    # (.9 + .7 + .8) / 3 = .8, and one of three is right: .8 - 1/3.
    assert overconfidence([0.9, 0.7, 0.8], [1.0, 0.0, 0.0]) == pytest.approx(0.8 - 1 / 3)
    assert overconfidence([0.5], [1.0]) == -0.5
    assert overconfidence([0.9, None], [1.0, 0.0]) is None


def test_up_to_sixteen_differences_every_pattern_is_counted_and_more_are_drawn():
    # All of one sign: 2 of 2^16 patterns. Of 17 differences 10,000 patterns are drawn, and (1 + 0) / 10,001 is least.
    assert randomisation_p([1.0] * 16) == 2 / 2**16
    assert randomisation_p([1.0] * 16 + [0.0]) == 2 / 2**16
    assert randomisation_p([1.0] * 17) * 10_001 == pytest.approx(1.0)
    assert randomisation_p([1.0, 1.0, 1.0, -1.0] * 5, resamples=99) * 100 == pytest.approx(
        round(randomisation_p([1.0, 1.0, 1.0, -1.0] * 5, resamples=99) * 100)
    )


def test_sums_that_differ_by_rounding_alone_are_as_far():
    # .1 + .2 - .3 is 0 and 2.8e-17 in floats, depending on the order. Of +-.1 +-.2 +-.3 all 8 sums are at least 0
    # away; with .3 + .1 - .2 = .2 those of .6, .2 and .4 are (6 of 8) and 0 is not.
    for some in itertools.permutations([0.1, 0.2, -0.3]):
        assert randomisation_p(some) == 1.0
    for some in itertools.permutations([0.3, 0.1, -0.2]):
        assert randomisation_p(some) == 0.75
    # .3 - .2 = .09999999999999998: the same difference everywhere.
    assert t_test_p([0.1, 0.1, 0.1, 0.3 - 0.2]) == 0.0


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


@pytest.mark.parametrize(("size", "resamples"), [(18, 10_000), (200, 10_000), (200, 7), (2**20 + 2, 2)])
def test_as_many_patterns_are_drawn_as_are_asked_for_in_however_many_batches(size, resamples):
    # The differences sum to 0, so every pattern is as far: p = (1 + drawn) / (1 + resamples). A batch has 2^20 signs:
    # all patterns of 18, 5,242 of 200, and one that is longer than a batch.
    assert randomisation_p([1.0, -1.0] * (size // 2), resamples=resamples) == 1.0


@pytest.mark.parametrize("compute", [randomisation_p, difference_interval])
def test_many_differences_are_resampled_in_bounded_memory(compute):
    # 10,000 resamples of 1,000 are 80 MB as numbers of 8 bytes; batches of 2^20 are 8 MB, with two copies 25.
    differences = [1.0, -1.0] * 500
    tracemalloc.start()
    try:
        compute(differences)
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()


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


@pytest.mark.parametrize("grouped", [False, True])
def test_an_interval_is_that_of_drawing_all_resamples_at_once(grouped):
    # 300 questions: three batches of 2^20 // 300 = 3,495 resamples, the last one shorter; with two differences each,
    # which are drawn together.
    generator = np.random.default_rng(5)
    values = generator.normal(size=(300, 2 if grouped else 1))
    drawn = np.random.default_rng(0).integers(0, 300, size=(10_000, 300))
    expected = np.quantile(values.mean(axis=1)[drawn].mean(axis=1), [0.025, 0.975])
    questions = [f"q{number:03d}" for number in range(300) for _ in range(2)] if grouped else None
    assert difference_interval(values.flatten().tolist(), questions) == pytest.approx(expected, rel=1e-12)


def test_a_question_weighs_by_its_number_of_differences():
    # 30 questions with 0, 0, 0 and 30 with 4: the mean over differences is 120 / 120 = 1, that over questions 2 +- .5.
    questions = [f"{number}{name}" for number in range(30) for name in "abaa"]
    low, high = difference_interval([0.0, 4.0, 0.0, 0.0] * 30, questions)
    assert low < 1.0 < high < 1.7


def test_more_differences_than_a_batch_has_numbers_are_resampled():
    assert difference_interval([0.25] * (2**20 + 1), resamples=2) == (0.25, 0.25)


def test_every_run_is_compared_with_each_before_it_and_the_correction_is_over_all():
    values = {"first": [0.0] * 3, "a": [1.0] * 3, "b": [1.0, 1.0, 0.0]}
    found = {(one.a, one.b): one for one in compare_all("nDCG@10", values)}
    assert list(found) == [("a", "first"), ("b", "first"), ("b", "a")]
    assert found["a", "first"].difference == 1.0
    assert found["b", "a"].difference == pytest.approx(-1 / 3)
    assert (found["b", "a"].better, found["b", "a"].worse) == (0, 1)
    assert [one.p_randomisation for one in found.values()] == [0.25, 0.5, 1.0]
    assert [one.p_holm for one in found.values()] == [0.75, 1.0, 1.0]


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


def test_mcnemar_counts_the_pairs_that_differ():
    # 1 against 4 of 5 pairs that differ: 2 (C(5,0) + C(5,1)) / 32 = 12 / 32.
    assert mcnemar_p([1, 0, 0, 0, 0, 1, 0], [0, 1, 1, 1, 1, 1, 0]) == 12 / 32
    assert mcnemar_p([1, 0], [1, 0]) == 1.0
    assert mcnemar_p([1, 0], [0, 1]) == 1.0
