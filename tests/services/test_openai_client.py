"""The real client against a real server on a loopback port."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from rag_posfix.errors import GenerationError
from tests.support.serving import (
    ANSWER,
    BRIDGE,
    QUESTION,
    FailingGenerator,
    ListRetriever,
    make_pipeline,
    serving,
)

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]


def connect(url: str, key: str = "unused") -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    pipeline = make_pipeline(window=2000, retriever=ListRetriever(BRIDGE))
    with serving(pipeline) as url, connect(url) as client:
        yield client


def test_a_plain_question_is_answered_from_the_index(client: openai.OpenAI):
    response = client.chat.completions.with_raw_response.create(model="fake", messages=MESSAGES)
    assert response.request_id
    completion = response.parse()
    assert completion.choices[0].message.content == ANSWER
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_with_usage(client: openai.OpenAI):
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].model_extra is not None
    assert chunks[-2].model_extra["documents"][0]["id"] == "r0"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


async def test_the_asynchronous_client_streams_too(client: openai.OpenAI):
    async with openai.AsyncOpenAI(base_url=str(client.base_url), api_key="unused", max_retries=0) as asynchronous:
        stream = await asynchronous.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == ANSWER


def test_models_are_listed(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "rag-posfix"


def test_errors_have_openais_types(client: openai.OpenAI):
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="gpt-9", messages=MESSAGES)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    assert unknown.value.request_id
    with pytest.raises(openai.BadRequestError, match="Did you mean 'context_experts'") as misspelt:
        create(model="fake", messages=MESSAGES, extra_body={"mitigation": "context_expert"})
    assert (misspelt.value.code, misspelt.value.type) == ("unknown_name", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as refused:
        create(model="fake", messages=MESSAGES, n=2, stream=True)
    assert refused.value.param == "n"
    with pytest.raises(openai.UnprocessableEntityError):
        create(model="fake", messages=MESSAGES, extra_body={"documents": 5})
    with pytest.raises(openai.BadRequestError) as long:
        create(model="fake", messages=MESSAGES, max_tokens=1990)
    assert (long.value.status_code, long.value.code) == (400, "context_length_exceeded")


def test_a_failure_in_the_stream_reaches_the_client_as_an_error():
    with serving(make_pipeline(FailingGenerator(2, GenerationError("secret")))) as url, connect(url) as client:
        stream = client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, extra_body={"documents": [BRIDGE]}
        )
        with pytest.raises(openai.APIError, match="the model failed") as failure:
            list(stream)
        assert failure.value.code == "generation_failed"
