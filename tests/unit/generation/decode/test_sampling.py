import math
from collections import Counter

import pytest
import torch

from rag_posfix.contracts.request import Sampling
from rag_posfix.generation.decode.answer_writer import Sampler

HALF_AND_LESS = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()


def drawn(sampling, log_probs=HALF_AND_LESS, count=400):
    sampler = Sampler(sampling)
    return [sampler.choose(log_probs) for _ in range(count)]


def test_greedy_takes_the_most_likely_token():
    assert Sampler(Sampling()).choose(HALF_AND_LESS) == 1


def test_greedy_takes_the_first_of_equals():
    tie = torch.tensor([0.1, 0.3, 0.3, 0.3]).log()
    assert {Sampler(Sampling()).choose(tie) for _ in range(20)} == {1}


def test_the_same_seed_draws_the_same_tokens():
    sampling = Sampling(temperature=1.0, seed=7)
    assert drawn(sampling) == drawn(sampling)
    assert drawn(sampling) != drawn(Sampling(temperature=1.0, seed=8))


def test_without_a_seed_every_sampler_draws_differently():
    assert drawn(Sampling(temperature=1.0)) != drawn(Sampling(temperature=1.0))


def test_draws_follow_the_probabilities():
    counts = Counter(drawn(Sampling(temperature=1.0, seed=1), count=4000))
    # 4000 draws: expected 400, 2000, 600, 1000; four standard deviations of the largest are 127.
    assert all(abs(counts[token] - expected) < 127 for token, expected in enumerate((400, 2000, 600, 1000)))


def test_temperature_sharpens_by_dividing_the_log_probabilities():
    # At temperature 0.5 probabilities are squared: 0.01, 0.25, 0.0225, 0.0625, so the second takes 0.25/0.345 = 0.725.
    counts = Counter(drawn(Sampling(temperature=0.5, seed=1), count=4000))
    assert counts[1] / 4000 == pytest.approx(0.725, abs=0.03)


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {1}), (2, {1, 3}), (3, {1, 2, 3}), (4, {0, 1, 2, 3}), (9, {0, 1, 2, 3}), (0, {0, 1, 2, 3})]
)
def test_top_k_keeps_that_many_tokens(top_k, kept):
    assert set(drawn(Sampling(temperature=1.0, top_k=top_k, seed=1))) == kept


def test_top_k_keeps_the_first_of_equals_and_no_more_than_k():
    tie = torch.tensor([0.1, 0.3, 0.3, 0.3]).log()
    assert set(drawn(Sampling(temperature=1.0, top_k=2, seed=1), tie)) == {1, 2}


# Sorted 0.5, 0.25, 0.15, 0.1; before them stand 0, 0.5, 0.75, 0.9.
@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, {1}), (0.49, {1}), (0.51, {1, 3}), (0.76, {1, 2, 3}), (0.91, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    assert set(drawn(Sampling(temperature=1.0, top_p=top_p, seed=1))) == kept


# Four equal scores are 1/4 each, exactly: before the tokens stand 0, 1/4, 1/2, 3/4. What is reached exactly is enough.
@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.25, {0}),
        (math.nextafter(0.25, 1), {0, 1}),
        (0.5, {0, 1}),
        (math.nextafter(0.5, 1), {0, 1, 2}),
        (0.75, {0, 1, 2}),
        (math.nextafter(0.75, 1), {0, 1, 2, 3}),
        (math.nextafter(1.0, 0), {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_that_is_reached_exactly_needs_no_further_token(top_p, kept):
    assert set(drawn(Sampling(temperature=1.0, top_p=top_p, seed=1), torch.zeros(4))) == kept


def test_top_p_close_to_1_still_leaves_out_what_is_beyond_it():
    # 16 equal tokens: 15 of them reach 15/16 = .9375.
    assert set(drawn(Sampling(temperature=1.0, top_p=15 / 16, seed=1), torch.zeros(16))) == set(range(15))


def test_top_p_counts_what_top_k_left():
    # Of 0.5 and 0.25 the first holds two thirds.
    assert set(drawn(Sampling(temperature=1.0, top_k=2, top_p=0.6, seed=1))) == {1}
    assert set(drawn(Sampling(temperature=1.0, top_k=2, top_p=0.7, seed=1))) == {1, 3}


def test_an_impossible_token_is_never_drawn():
    scores = torch.tensor([-math.inf, 0.0, -math.inf])
    assert set(drawn(Sampling(temperature=5.0, seed=1), scores)) == {1}


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 5e-324])
def test_a_temperature_close_to_zero_is_almost_greedy(temperature):
    assert set(drawn(Sampling(temperature=temperature, seed=1), count=50)) == {1}


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**64 - 1])
def test_every_allowed_seed_seeds(seed):
    sampling = Sampling(temperature=1.0, seed=seed)
    assert drawn(sampling, count=20) == drawn(sampling, count=20)


def test_no_global_random_state_is_touched():
    before = torch.random.get_rng_state()
    drawn(Sampling(temperature=1.0, seed=1))
    drawn(Sampling(temperature=1.0))
    assert torch.equal(before, torch.random.get_rng_state())
