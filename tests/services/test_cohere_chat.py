"""Cohere's chat, version 2, with the real client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cohere
import httpx
import pytest
from cohere.core.api_error import ApiError

from rag_posfix.contracts.answer import Answer, AnswerDocument, Citation
from rag_posfix.contracts.request import Usage
from rag_posfix.errors import GenerationError
from rag_posfix_api.dialects.cohere import ChatRenderer
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

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
DOCUMENTS: list[Any] = [HARBOUR, {"id": "b", "data": {"text": BRIDGE, "title": "Bridges", "url": "https://b.test"}}]


@pytest.fixture(scope="module")
def client() -> Iterator[cohere.ClientV2]:
    pipeline = make_pipeline(window=2000, retriever=ListRetriever(HARBOUR))
    with serving(pipeline, api_key="key") as url, httpx.Client(timeout=60) as http:
        yield cohere.ClientV2(api_key="key", base_url=url, httpx_client=http, max_retries=0)


def test_an_answer_has_citations_with_the_fields_of_their_documents(client: cohere.ClientV2):
    answered = client.chat(model="fake", messages=MESSAGES, documents=DOCUMENTS)
    assert answered.finish_reason == "COMPLETE"
    assert answered.message.content is not None
    assert [part.text for part in answered.message.content if part.type == "text"] == [ANSWER]
    assert answered.message.citations is not None
    (citation,) = answered.message.citations
    assert (citation.start, citation.end, citation.text) == (0, len(ANSWER), ANSWER)
    assert citation.sources is not None
    (source,) = citation.sources
    assert (source.type, source.id) == ("document", "b")
    assert source.document == {"id": "b", "text": BRIDGE, "title": "Bridges", "url": "https://b.test"}
    assert answered.usage is not None
    assert answered.usage.tokens is not None
    assert answered.usage.tokens.output_tokens == 8


@pytest.mark.parametrize("document", [BRIDGE, {"data": {"text": BRIDGE}}])
def test_a_document_without_an_id_gets_the_id_of_no_other_document(client: cohere.ClientV2, document: Any):
    others = [{"id": "doc_0", "data": {"text": HARBOUR}}, {"id": "doc_0_", "data": {"text": "Fog."}}]
    answered = client.chat(model="fake", messages=MESSAGES, documents=[document, *others])
    assert answered.message.citations is not None
    (citation,) = answered.message.citations
    assert citation.sources is not None
    (source,) = citation.sources
    assert source.document == {"id": source.id, "text": BRIDGE}
    assert source.id not in ("doc_0", "doc_0_")


def test_a_stream_has_the_events_of_the_api_in_order(client: cohere.ClientV2):
    events = list(client.chat_stream(model="fake", messages=MESSAGES, documents=DOCUMENTS))
    kinds = [event.type for event in events]
    assert kinds == [
        "message-start",
        "content-start",
        *["content-delta"] * 8,
        "citation-start",
        "citation-end",
        "content-end",
        "message-end",
    ]
    text = "".join(event.delta.message.content.text for event in events if event.type == "content-delta")  # type: ignore[union-attr]
    assert text == ANSWER
    (cited,) = [event.delta.message.citations for event in events if event.type == "citation-start"]  # type: ignore[union-attr]
    assert cited.text == text[cited.start : cited.end] == ANSWER  # type: ignore[union-attr]
    assert cited.sources[0].document["title"] == "Bridges"  # type: ignore[union-attr,index]
    end = events[-1].delta
    assert end.finish_reason == "COMPLETE"  # type: ignore[union-attr]
    assert end.usage.tokens.output_tokens == 8  # type: ignore[union-attr]


def test_without_documents_passages_are_retrieved_and_citations_can_be_off(client: cohere.ClientV2):
    asked: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "When did the harbour freeze?"}]},
    ]
    answered = client.chat(model="default", messages=asked)
    assert answered.message.citations is not None
    assert answered.message.citations[0].sources is not None
    assert answered.message.citations[0].sources[0].id == "r0"
    answered = client.chat(model="default", messages=asked, citation_options=cohere.CitationOptions(mode="OFF"))
    assert answered.message.citations is None
    kinds = [
        event.type
        for event in client.chat_stream(
            model="default", messages=asked, citation_options=cohere.CitationOptions(mode="OFF")
        )
    ]
    assert "citation-start" not in kinds


def test_max_tokens_and_stop_sequences_end_the_answer(client: cohere.ClientV2):
    short = client.chat(model="fake", messages=MESSAGES, documents=DOCUMENTS, max_tokens=2)
    assert short.finish_reason == "MAX_TOKENS"
    stopped = client.chat(model="fake", messages=MESSAGES, documents=DOCUMENTS, stop_sequences=["was"])
    assert stopped.finish_reason == "STOP_SEQUENCE"
    assert stopped.message.content is not None
    assert stopped.message.content[0].text.strip() == "The bridge of Arvo"  # type: ignore[union-attr]
    *_, end = client.chat_stream(model="fake", messages=MESSAGES, documents=DOCUMENTS, stop_sequences=["was"])
    assert end.delta.finish_reason == "STOP_SEQUENCE"  # type: ignore[union-attr]


def test_a_sentence_known_by_attention_is_cited_where_no_quote_is():
    text = "It opened in 1911. Ships waited for weeks."
    citations = (
        Citation(0, 18, text[:18], ("a",), "attention"),
        Citation(19, 42, text[19:], ("b",), "attention"),
        Citation(19, 41, text[19:41], ("b",)),
    )
    answer = Answer(text, (), citations, Usage(1, 1), False, "none", "relevance", "stop")
    message = ChatRenderer("x", {"a": {"text": "A"}}, cites=True).whole(answer)["message"]
    assert [(one["start"], one["end"]) for one in message["citations"]] == [(0, 18), (19, 41)]
    assert message["citations"][1]["sources"] == [{"type": "document", "id": "b", "document": {"id": "b"}}]


def test_a_source_names_the_page_of_the_cited_sentence():
    documents = (AnswerDocument("a", None, 0, 0.0, page=3, pages=(3, 4), page_starts=(0, 9)),)
    citations = (Citation(0, 4, "Yes.", ("a",), pages=(4,)),)
    answer = Answer("Yes.", documents, citations, Usage(1, 1), False, "none", "relevance", "stop")
    message = ChatRenderer("x", {}, cites=True).whole(answer)["message"]
    assert message["citations"][0]["sources"][0]["document"] == {"id": "a", "page": 4}


@pytest.mark.parametrize(
    ("sentence", "is_cited"), [((0, 4), True), ((0, 5), False), ((8, 12), True), ((7, 12), False), ((0, 12), False)]
)
def test_a_sentence_that_touches_a_quote_is_cited_and_one_that_overlaps_it_is_not(
    sentence: tuple[int, int], is_cited: bool
):
    citations = (Citation(4, 8, "4567", ("q",)), Citation(*sentence, "", ("s",), "attention"))
    answer = Answer("0123456789ab", (), citations, Usage(1, 1), False, "none", "relevance", "stop")
    message = ChatRenderer("x", {}, cites=True).whole(answer)["message"]
    spans = [(one["start"], one["end"]) for one in message["citations"]]
    assert spans == ([(4, 8), sentence] if is_cited else [(4, 8)])


def test_errors_are_cohere_s(client: cohere.ClientV2):
    with pytest.raises(cohere.NotFoundError) as unknown:
        client.chat(model="command-z", messages=MESSAGES)
    assert "command-z" in unknown.value.body["message"]
    with pytest.raises(ApiError) as long:
        client.chat(model="fake", messages=MESSAGES, documents=DOCUMENTS, max_tokens=1990)
    assert (long.value.status_code, long.value.body["code"]) == (400, "context_length_exceeded")


def test_a_failure_in_the_stream_is_its_last_event():
    pipeline = make_pipeline(FailingGenerator(2, GenerationError("secret")))
    with serving(pipeline) as url, httpx.Client(timeout=60) as http:
        failing = cohere.ClientV2(api_key="key", base_url=url, httpx_client=http, max_retries=0)
        *_, last = failing.chat_stream(model="fake", messages=MESSAGES, documents=DOCUMENTS)
    assert last.type == "message-end"
    assert last.delta is not None
    assert last.delta.finish_reason == "ERROR"
    assert last.delta.error is not None
    assert last.delta.error.startswith("the model failed")


@pytest.mark.parametrize(
    ("fields", "status", "part"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "role 'tool'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "must be 'user'"),
        ({"documents": [{"id": "a", "data": {"year": 1911}}]}, 422, "documents"),
        ({"tools": [{"type": "function"}]}, 400, "tools is not supported"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"p": 0, "temperature": -1}, 400, "temperature=-1"),
        ({"posfix": {"orders": "reverse"}}, 422, "posfix.orders"),
    ],
)
def test_bad_requests_get_an_error_of_the_dialect(fields: dict[str, Any], status: int, part: str):
    client = client_for(max_documents=3)
    response = client.post("/v2/chat", json={"model": "fake", "messages": MESSAGES, **fields})
    assert response.status_code == status, response.text
    assert set(response.json()) == {"message", "code", "param"}
    assert part in response.json()["message"]
