"""Which methods run on a server is a property of their plans; several rows vote."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling, Usage
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.generation.remote.generator import check_remote_mitigation, most_agreed, open_remote, remote_refusal
from rag_posfix.mitigations import MITIGATIONS
from tests.support.upstream import Reply, upstream, whole

TEXTS = ("Alpha is first.", "Beta is second.", "Gamma is third.")


def test_those_run_whose_rows_are_plain_prompts():
    runs = {name for name, cls in MITIGATIONS.items() if remote_refusal(cls(**cls.example)) is None}
    assert {"none", "repeated_passages", "canonical_rotations"} <= runs
    assert not {"context_experts", "committee", "inter_document", "parallel_encoding", "layer_scaling"} & runs


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("default", "pools the probabilities"),
        ("committee", "pools the probabilities"),
        ("inter_document", "its weights are on a server"),
        ("calibrated_attention", "its weights are on a server"),
    ],
)
def test_a_refusal_says_why_and_what_runs(name: str, reason: str):
    with pytest.raises(UnsupportedModelError, match=rf"{reason}.*yes_no:top_n=5.*order='reverse'"):
        check_remote_mitigation("m", MitigationChoice(name))


def test_rotations_are_as_order_free_on_a_server():
    assert check_remote_mitigation("m", MitigationChoice("canonical_rotations")).order_invariant
    assert not check_remote_mitigation("m", MitigationChoice("repeated_passages")).order_invariant


@pytest.mark.parametrize(
    ("answers", "weights", "expected"),
    [
        (["Rome", "rome.", "Paris"], [1, 1, 1], 0),
        (["Paris", "Rome", "Rome"], [3, 1, 1], 0),
        (["Paris", "Rome", "Rome"], [1, 1, 1], 1),
        (["a", "b"], [1, 1], 0),
        (["it is the year 1963", "1963", "in 1901"], [1, 1, 1], 0),  # 1 + 2/6 + 0; 2/6 + 1 + 0: the first
        (["", "", "x"], [1, 1, 1], 0),
    ],
)
def test_the_answer_that_agrees_most_with_the_others(answers: list[str], weights: list[float], expected: int):
    assert most_agreed(answers, weights) == expected


def requested(generator: Any, mitigation: str, **parameters: Any) -> GenerationRequest:
    documents = [Document(text, metadata={"relevance_score": 0.9 - i / 4}) for i, text in enumerate(TEXTS)]
    layout = Assembler(generator.encoder, 4096).assemble("Which?", documents).layout
    return GenerationRequest(layout, MitigationChoice(mitigation, parameters), Sampling(max_tokens=5))


def places(body: dict[str, Any]) -> list[str]:
    content = body["messages"][-1]["content"]
    return [content[i : i + 5].split()[0] for i in sorted(content.find(text) for text in TEXTS)]


def last_passage(body: dict[str, Any]) -> Reply:
    """A reader that is right if the best passage is last, and else says something of its own."""
    last = places(body)[-1]
    return whole({"Alpha": "alpha", "Beta": "alpha!", "Gamma": "gamma"}[last])


@pytest.mark.parametrize("stream", [False, True])
def test_each_passage_is_last_once_and_the_answers_vote(stream: bool):
    with upstream(last_passage) as server:
        generator = open_remote(server.model)
        request = requested(generator, "canonical_rotations")
        chunks = list(generator.stream(request)) if stream else []
        generation = chunks[-1].generation if stream else generator.generate(request)
        generator.close()
    assert generation is not None
    assert generation.text == "alpha"
    assert generation.usage == Usage(120, 9, 48)
    assert sorted(places(body)[-1] for body in server.bodies) == ["Alpha", "Beta", "Gamma"]
    assert not any(body["stream"] for body in server.bodies)


def test_repeated_passages_are_in_the_prompt_twice():
    with upstream(whole("x")) as server:
        generator = open_remote(server.model)
        generator.generate(requested(generator, "repeated_passages"))
        generator.close()
    assert [server.bodies[0]["messages"][-1]["content"].count(text) for text in TEXTS] == [2, 2, 2]
