import dataclasses
import json

import numpy as np
import pytest

from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, PromptTemplate, Sampling
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


def test_numbers_of_numpy_are_plain_numbers():
    whole = {"max_tokens": 5, "top_k": 4, "seed": 3, "top_logprobs": 2}
    real = {"temperature": 0.5, "top_p": 0.25}
    sampling = Sampling(
        **{name: np.int64(value) for name, value in whole.items()},
        **{name: np.float32(value) for name, value in real.items()},
    )
    assert repr(sampling) == repr(Sampling(**whole, **real))
    assert json.loads(json.dumps(dataclasses.asdict(sampling)))["seed"] == 3


def test_a_schema_that_is_nested_too_deeply_is_refused():
    deep = "[" * 100_000 + "]" * 100_000
    nested = {}
    for _ in range(100_000):
        nested = {"items": nested}
    for schema in (f'{{"enum": {deep}}}', nested):
        with pytest.raises(ConfigError, match="json_schema is no JSON"):
            Sampling(json_schema=schema)


@pytest.mark.parametrize(
    ("prefix", "cue", "expected"),
    [
        ("Question: ", "\nAnswer:", ("\nQuestion:", "\nAnswer:")),
        ("Question : ", "\nRéponse :", ("\nQuestion :", "\nQuestion:", "\nRéponse :", "\nRéponse:")),
        ("问题\uff1a", "\n回答\uff1a", ("\n问题\uff1a", "\n问题:", "\n回答\uff1a", "\n回答:")),
        ("Read well.\n\n### Question\n", "\n\n### Answer\n", ("\n### Question\n", "\n### Answer\n")),
        ("<question>", "</question>", ("\n<question>", "\n</question>")),
        ("Say ", "", ()),  # sentences begin with such words
        ("Q", "\n\n", ()),
        ("", " ->", ()),
    ],
)
def test_the_cues_are_the_lines_that_begin_a_question_or_an_answer(prefix, cue, expected):
    assert PromptTemplate(question_prefix=prefix, answer_cue=cue).cues == expected
