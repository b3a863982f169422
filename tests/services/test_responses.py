"""OpenAI's responses, with the real client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from rag_posfix.contracts.answer import Answer, AnswerDocument, Citation
from rag_posfix.contracts.request import Sampling, Usage
from rag_posfix.errors import GenerationError
from rag_posfix_api.dialects.responses import ResponseRenderer, ResponsesRequest, TextOptions
from tests.support.serving import (
    ANSWER,
    BRIDGE,
    HARBOUR,
    QUESTION,
    FailingGenerator,
    ListRetriever,
    client_for,
    make_pipeline,
    serving,
)


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving(make_pipeline(window=2000, retriever=ListRetriever(BRIDGE))) as url, connect(url) as client:
        yield client


def test_a_question_is_answered_from_the_index(client: openai.OpenAI):
    response = client.responses.create(model="fake", input=QUESTION, instructions="Be brief.", temperature=0.5)
    assert response.output_text == ANSWER
    assert (response.status, response.instructions, response.temperature) == ("completed", "Be brief.", 0.5)
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 0
    assert (response.usage.output_tokens, response.usage.total_tokens) == (8, response.usage.input_tokens + 8)
    assert response.model_extra is not None
    assert response.model_extra["posfix"]["documents"][0]["id"] == "r0"


def test_a_conversation_with_documents(client: openai.OpenAI):
    response = client.responses.create(
        model="default",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hello!"}]},  # type: ignore[list-item]
            {"type": "message", "role": "user", "content": "When did the harbour freeze?"},
        ],
        max_output_tokens=3,
        extra_body={"documents": [HARBOUR, BRIDGE], "posfix": {"mitigation": "none"}},
    )
    assert response.output_text.strip() == "The harbour froze"
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.slow
def test_a_stream_has_the_ten_types_of_events_in_order(client: openai.OpenAI):
    events = list(client.responses.create(model="fake", input=QUESTION, stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 8,
        "response.output_text.annotation.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == ANSWER
    with client.responses.stream(model="fake", input=QUESTION) as stream:
        assert stream.get_final_response().output_text == ANSWER


def test_each_file_is_cited_once_where_its_sentence_ends():
    documents = (
        AnswerDocument("a", None, 0, 0.5, title="A", source="a.txt"),
        AnswerDocument("b", None, 1, 0.5, title="B"),
        AnswerDocument("c", None, 2, 0.0),
    )
    citations = (
        Citation(0, 4, "One.", ("a", "b")),
        Citation(5, 9, "Two.", ("c", "a")),
        Citation(5, 9, "Two.", ("c",), "attention"),
    )
    answer = Answer("One. Two.", documents, citations, Usage(1, 1), False, "none", "relevance", "stop")
    response = ResponseRenderer("x", "fake", Sampling(), ResponsesRequest(input="?"), TextOptions()).whole(answer)
    annotations = response["output"][0]["content"][0]["annotations"]
    assert [(each["index"], each["file_id"], each["filename"]) for each in annotations] == [
        (4, "a", "a.txt"), (4, "b", "B"), (9, "c", "c"), (9, "a", "a.txt"),
    ]  # fmt: skip


def test_a_failure_in_the_stream_is_its_last_event():
    pipeline = make_pipeline(FailingGenerator(2, GenerationError("secret")))
    with serving(pipeline) as url, connect(url) as client:
        *_, last = client.responses.create(
            model="fake", input=QUESTION, stream=True, extra_body={"documents": [BRIDGE]}
        )
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "generation_failed"
    assert "secret" not in last.response.error.message


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": []}, 422, "input"),
        ({"input": " "}, 400, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, 400, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"text": {"format": {"type": "json_object"}}}, 400, None),  # this generator writes no JSON
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text"),
        ({"text": {"format": {"type": "grammar"}}}, 422, "text.format.type"),
    ],
)
def test_bad_requests_are_told_as_openai_does(fields: dict[str, Any], status: int, param: str | None):
    client = client_for(max_documents=3)
    response = client.post("/v1/responses", json={"input": QUESTION, **fields})
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
