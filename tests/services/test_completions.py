"""/v1/completions with the real client, and as lm-evaluation-harness reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import httpx2
import openai
import pytest

from rag_posfix.generation.fake import FakeGenerator
from tests.support.serving import GatedGenerator, make_pipeline, serving
from tests.support.toy_encoder import ToyEncoder

HALF = math.log(0.5)
PROMPT = "ab"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(make_pipeline(window=400)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0, timeout=60) as client:
        yield client


def post(url: str, **fields: Any) -> httpx2.Response:
    return httpx2.post(url + "/v1/completions", json={"model": "fake", "prompt": PROMPT, **fields}, timeout=60)


def test_a_prompt_is_continued_as_it_is(client: openai.OpenAI):
    completion = client.completions.create(model="fake", prompt=PROMPT, max_tokens=3)
    (choice,) = completion.choices
    assert (completion.object, choice.index, choice.logprobs) == ("text_completion", 0, None)
    # The fake generator has no passages, and says the prompt: no template is around it.
    assert choice.text == "No passages for: "
    assert choice.finish_reason == "length"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 3)


@pytest.mark.parametrize("prompt", [["ab", "c"], [[97, 98], [99]]])
def test_several_prompts_are_answered_in_their_order(client: openai.OpenAI, prompt: Any):
    completion = client.completions.create(model="fake", prompt=prompt, max_tokens=16, echo=True)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert [choice.text for choice in completion.choices] == ["abNo passages for: ab", "cNo passages for: c"]
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 3


def test_echo_with_log_probabilities_scores_the_prompt(client: openai.OpenAI):
    completion = client.completions.create(model="fake", prompt=[97, 98], max_tokens=1, echo=True, logprobs=2)
    scored = completion.choices[0].logprobs
    assert scored is not None
    assert completion.choices[0].text == "abNo "
    assert scored.tokens == ["a", "b", "No "]
    assert scored.token_logprobs == [None, pytest.approx(HALF), pytest.approx(HALF)]
    assert scored.text_offset == [0, 1, 2]
    assert scored.top_logprobs is not None
    assert scored.top_logprobs[0] is None
    assert scored.top_logprobs[1] == {"b": pytest.approx(HALF), "other1": pytest.approx(2 * HALF)}


def test_nothing_is_generated_for_max_tokens_0(client: openai.OpenAI):
    completion = client.completions.create(model="fake", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    (choice,) = completion.choices
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b"]
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 0
    assert client.completions.create(model="fake", prompt=PROMPT, max_tokens=0).choices[0].text == ""


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"echo": True, "logprobs": 1}, {"logprobs": 0}])
def test_a_stream_brings_what_the_whole_answer_has(client: openai.OpenAI, fields: dict[str, Any]):
    asked = {"model": "fake", "prompt": ["ab", "c"], "max_tokens": 16, **fields}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    for expected in whole.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == expected.index]
        assert "".join(choice.text for choice in own) == expected.text
        assert own[-1].finish_reason == "stop"
        if expected.logprobs is not None:
            found = [token for choice in own for token in choice.logprobs.tokens or ()]
            assert found == expected.logprobs.tokens
            starts = [start for choice in own for start in choice.logprobs.text_offset or ()]
            assert starts == expected.logprobs.text_offset


def log_likelihoods(body: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """What the harness's ``local-completions`` reads from an answer: all but the one generated token."""
    found = []
    for choice, length in zip(sorted(body["choices"], key=itemgetter("index")), context_lengths, strict=True):
        own = choice["logprobs"]["token_logprobs"][length:-1]
        top = choice["logprobs"]["top_logprobs"][length:-1]
        greedy = all(value == max(others.values()) for value, others in zip(own, top, strict=True))
        found.append((sum(own), greedy))
    return found


def test_the_harness_reads_its_log_likelihoods(url: str):
    response = post(
        url, prompt=[[97, 98, 99], [97, 98]], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    assert response.status_code == 200
    assert log_likelihoods(response.json(), [1, 1]) == [(pytest.approx(2 * HALF), True), (pytest.approx(HALF), True)]
    # Its requests to generate.
    generated = post(url, max_tokens=16, temperature=0, stop=["for", "\n\n"], seed=1234)
    assert generated.json()["choices"][0]["text"] == "No passages "


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"n": 2}, 400, "n"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"logprobs": 21}, 400, "logprobs"),
        ({"prompt": [5, 259]}, 400, "prompt"),
        ({"prompt": ""}, 422, "prompt"),
        ({"prompt": ["a", 5]}, 422, "prompt[1]"),
        ({"prompt": [-1]}, 422, "prompt[0]"),
        ({"max_tokens": 1000}, 400, None),
    ],
)
def test_what_is_wrong_is_refused_in_openais_format(url: str, fields: dict[str, Any], status: int, param: str | None):
    response = post(url, **fields)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    streamed = post(url, **fields, stream=True)
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (status, param)


class UnscoredGenerator(FakeGenerator):
    """Gives no log-probabilities, as a remote server may."""

    capabilities = frozenset()


class NoPromptEncoder(ToyEncoder):
    """Encodes chats only."""

    vocab_size = 0


def test_a_generator_without_log_probabilities_says_so_in_both_routes():
    with serving(make_pipeline(UnscoredGenerator(ToyEncoder()))) as url:
        body = {"messages": [{"role": "user", "content": "hello"}], "documents": [], "logprobs": True}
        for refused in (post(url, logprobs=1), httpx2.post(url + "/v1/chat/completions", json=body, timeout=60)):
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")
            assert "returns no log-probabilities" in refused.json()["error"]["message"]
        assert post(url).status_code == 200


def test_a_generator_that_takes_chats_only_says_so():
    with serving(make_pipeline(FakeGenerator(NoPromptEncoder()))) as url:
        refused = post(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")


def test_a_client_that_leaves_ends_its_stream():
    generator = GatedGenerator()
    generator.gate.set()
    with serving(make_pipeline(generator)) as url:
        with httpx2.stream(
            "POST", url + "/v1/completions", json={"prompt": "ab c d e", "stream": True}, timeout=60
        ) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["object"] == "text_completion"
        assert generator.closed.wait(60)
