import dataclasses

import pytest

from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError
from tests.support.tiny import toy_layout


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be >= 1"),
        ({"max_tokens": -5}, "max_tokens=-5 must be >= 1"),
        ({"temperature": -0.1}, "temperature=-0.1 must be between 0 (greedy) and 5"),
        ({"temperature": 5.1}, "temperature=5.1 must be between 0 (greedy) and 5"),
        ({"temperature": float("nan")}, "temperature=nan must be between 0 (greedy) and 5"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p=1.01 must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p=nan must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k=-1 must be >= 0 (0 keeps all tokens)"),
        ({"seed": 2**64}, "seed=18446744073709551616 must be between -2**63 and 2**64 - 1"),
        ({"seed": -(2**63) - 1}, "seed=-9223372036854775809 must be between -2**63 and 2**64 - 1"),
        ({"stop": ("a", "")}, "stop holds an empty string; leave it out or give at least one character"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_value_and_what_is_allowed(settings, message):
    with pytest.raises(ConfigError) as caught:
        Sampling(**settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "settings",
    [{"max_tokens": 1}, {"temperature": 5.0}, {"top_p": 1.0}, {"top_p": 1e-9}, {"top_k": 0}, {"seed": 0}],
)
def test_the_ends_of_the_ranges_are_allowed(settings):
    assert Sampling(**settings)


@pytest.mark.parametrize(
    ("settings", "deterministic"),
    [({}, True), ({"temperature": 0.7}, False), ({"temperature": 0.7, "seed": 0}, True), ({"top_p": 0.5}, True)],
)
def test_greedy_and_seeded_sampling_are_deterministic(settings, deterministic):
    assert Sampling(**settings).deterministic is deterministic


def test_a_request_without_more_is_greedy_and_unmodified():
    request = GenerationRequest(toy_layout())
    assert request.mitigation == MitigationChoice("none", {})
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.0, 128)


def test_requests_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sampling().max_tokens = 3
