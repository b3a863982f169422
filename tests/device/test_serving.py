"""Answers on the device: streamed, with log-probabilities and sources, sampled, drafted, and several at a time."""

from contextlib import closing
from dataclasses import replace

import pytest

from rag_posfix.contracts.request import Generation, GenerationRequest, MitigationChoice, Sampling
from rag_posfix.generation.batching.scheduler import BatchingGenerator, advance_batch
from rag_posfix.generation.decode.answer_writer import Sampler, choose_together
from tests.support.device_twin import DEVICE, Counts, counted
from tests.support.threads import in_threads
from tests.support.tiny import toy_layout
from tests.support.twin_engines import TOLERANCE, tiny_engine_on

LAYOUT = toy_layout(relevance=(0.9, 0.2, 0.4, 0.3))
METHODS = ["none", "context_experts", "inter_document"]


def request(name: str, **sampling: object) -> GenerationRequest:
    return GenerationRequest(LAYOUT, MitigationChoice(name), Sampling(max_tokens=6, **sampling), attribution=True)


def as_plain(generation: Generation) -> dict[str, object]:
    """Return what an answer says, without times."""
    scored = [
        (scored.token.log_prob, [other.log_prob for other in scored.top])
        for scored in (*generation.prompt_log_probs, *generation.log_probs)
    ]
    return {
        "tokens": generation.token_ids,
        "attention": generation.attention,
        "sources": [source.shares for source in generation.sources],
        "scores": scored,
    }


def streamed(device: str, name: str) -> list[object]:
    """Return an answer's pieces of text, and the answer with sources and log-probabilities."""
    chunks = list(tiny_engine_on(device).stream(request(name, top_logprobs=3)))
    return [[chunk.text for chunk in chunks], as_plain(chunks[-1].generation)]


def sampled(device: str, name: str) -> dict[str, object]:
    asked = request(name, temperature=0.8, top_p=0.9, top_k=40, seed=7)
    return as_plain(tiny_engine_on(device).generate(asked))


def with_prompt_scored(device: str) -> dict[str, object]:
    asked = GenerationRequest(toy_layout(()), sampling=Sampling(max_tokens=3, top_logprobs=2), prompt_scored=True)
    return as_plain(tiny_engine_on(device).generate(asked))


def batched(device: str) -> list[dict[str, object]]:
    """Return the answers to requests of several methods and lengths that are decoded together."""
    asked = [replace(request(name), sampling=Sampling(max_tokens=4 + i)) for i, name in enumerate(METHODS)]
    with closing(BatchingGenerator(tiny_engine_on(device), max_running=3)) as generator:
        return [as_plain(answer) for answer in in_threads(generator.generate, asked)]


def scored(device: str, name: str) -> tuple[float, ...]:
    return tiny_engine_on(device).open(LAYOUT, MitigationChoice(name), 5).score((5, 9, 11, 20))


def steps_together(n_requests: int) -> Counts:
    """Count what three steps of several requests take."""
    sessions = [tiny_engine_on(DEVICE).open(LAYOUT, MitigationChoice("context_experts"), 9) for _ in range(n_requests)]
    samplers = [Sampler(Sampling())] * n_requests
    for session in sessions:
        session.next_log_probs()
    with counted() as counts:
        for _ in range(3):
            advance_batch(sessions, choose_together(samplers, [session.next_log_probs() for session in sessions]))
    return counts


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("action", [streamed, sampled, scored])
def test_an_answer_is_that_of_the_cpu(on_both, action, name):
    assert on_both(action, name).difference <= TOLERANCE


@pytest.mark.parametrize("action", [with_prompt_scored, batched])
def test_answers_are_those_of_the_cpu(on_both, action):
    assert on_both(action).difference <= TOLERANCE


def test_requests_together_take_one_read_and_one_upload_whatever_their_number(on_twin):
    counts = on_twin(steps_together, 4)
    assert counts.reads == {"tolist": 3}
    assert counts.uploads == {"copy from the CPU": 3}
