"""Anthropic's messages, with the real client against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic.types import (
    CitationCharLocation,
    CitationContentBlockLocation,
    CitationsSearchResultLocation,
    DocumentBlockParam,
    TextBlock,
)

from rag_posfix.contracts.answer import Answer, Citation
from rag_posfix.contracts.request import Generation, GenerationRequest, Usage
from rag_posfix.errors import GenerationError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix_api.dialects.anthropic import CitableDocument, cited_blocks
from tests.support.serving import (
    ANSWER,
    BRIDGE,
    CHAT,
    HARBOUR,
    QUESTION,
    DictCache,
    FailingGenerator,
    ListRetriever,
    chat,
    client_for,
    make_pipeline,
    serving,
)
from tests.support.toy_encoder import ToyEncoder


def connect(url: str, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": url, "api_key": "right", "max_retries": 0, "timeout": 60, **options})


def document(text: str, **fields: Any) -> DocumentBlockParam:
    source: Any = {"type": "text", "media_type": "text/plain", "data": text}
    return {"type": "document", "source": source, "citations": {"enabled": True}, **fields}  # type: ignore[typeddict-item]


def asked(*blocks: Any, text: str = QUESTION) -> list[Any]:
    return [{"role": "user", "content": [*blocks, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    pipeline = make_pipeline(window=2000, retriever=ListRetriever(HARBOUR))
    with serving(pipeline, api_key="right", max_documents=5) as url, connect(url) as client:
        yield client


def test_citations_are_characters_of_the_document(client: anthropic.Anthropic):
    text = "News of 1911.\n\n" + BRIDGE
    message = client.messages.create(
        model="fake",
        max_tokens=50,
        messages=asked(document(HARBOUR), document(text, title="Bridges")),
        system="Answer in one sentence.",
    )
    blocks = [block for block in message.content if isinstance(block, TextBlock)]
    written = "".join(block.text for block in blocks)
    assert written == text.split(". ")[0] == "News of 1911.\n\n" + ANSWER
    cited = [block for block in blocks if block.citations]
    assert [block.text for block in cited] == ["News of 1911.", ANSWER]  # each sentence has its own evidence
    for block, sentence in zip(cited, ("News of 1911.", f"{ANSWER}."), strict=True):
        assert block.citations is not None
        (citation,) = block.citations
        assert isinstance(citation, CitationCharLocation)
        assert citation.cited_text == text[citation.start_char_index : citation.end_char_index] == sentence
        assert (citation.document_index, citation.document_title) == (1, "Bridges")
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "fake")
    assert message.usage.output_tokens == len(written.split())
    assert message.usage.input_tokens > 20
    assert message.model_extra is not None
    assert message.model_extra["posfix"]["documents"][0]["id"] in ("doc_0", "doc_1")


def test_input_tokens_exclude_the_cached_ones_whole_and_streamed():
    class PartlyCached(FakeGenerator):
        def generate(self, request: GenerationRequest) -> Generation:
            generation = super().generate(request)
            return replace(generation, usage=replace(generation.usage, cached_tokens=30))

    pipeline = make_pipeline(PartlyCached(ToyEncoder()), cache=DictCache())
    client = client_for(pipeline)
    body = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": QUESTION}]}
    whole = client.post("/v1/messages", json=body).json()["usage"]
    assert whole["cache_read_input_tokens"] == 30
    in_all = whole["input_tokens"] + 30
    assert in_all == client.post(CHAT, json=chat(cache=False)).json()["usage"]["prompt_tokens"]
    stream = client.post("/v1/messages", json={**body, "stream": True}).text
    (delta,) = [line for line in stream.splitlines() if line.startswith("data: ") and "message_delta" in line]
    streamed = json.loads(delta.removeprefix("data: "))["usage"]
    assert (streamed["input_tokens"], streamed["cache_read_input_tokens"]) == (0, in_all), "the answer is cached"


def test_text_around_quotes_is_in_blocks_of_its_own():
    text = f"They say: {ANSWER}, and ships waited for weeks."
    start = text.index("The bridge")
    end = start + len(ANSWER)
    ships = text.index("ships")
    answer = Answer(
        text,
        documents=(),
        citations=(
            Citation(start, end, text[start:end], ("doc_0", "doc_2")),
            Citation(0, len(text), text, ("doc_0",), "attention"),
            Citation(ships, len(text) - 1, text[ships:-1], ("doc_1",)),
        ),
        usage=Usage(1, 1),
        cached=False,
        mitigation="none",
        order="relevance",
        finish_reason="stop",
    )
    documents = [
        CitableDocument("doc_0", None, "Listen! the BRIDGE of Arvo: was built in 1911.", None, enabled=True),
        CitableDocument("doc_1", None, HARBOUR, None, enabled=False),
        CitableDocument("doc_2", "t", "no such words", None, enabled=True),
    ]
    before, cited, after = cited_blocks(answer, documents)
    assert (before.text, cited.text, after.text) == ("They say: ", ANSWER, ", and ships waited for weeks.")
    assert before.citations is after.citations is None
    assert cited.citations is not None
    (citation,) = cited.citations
    assert citation.cited_text == "the BRIDGE of Arvo: was built in 1911."
    assert citation.type == "char_location"
    assert (citation.start_char_index, citation.end_char_index) == (8, 46)
    assert (citation.answer_start_index, citation.answer_end_index) == (start, end)


def test_a_document_that_may_not_be_cited_is_read_and_not_cited(client: anthropic.Anthropic):
    message = client.messages.create(
        model="fake", max_tokens=50, messages=asked(document(BRIDGE, citations={"enabled": False}))
    )
    assert [(block.type, getattr(block, "citations", "")) for block in message.content] == [("text", None)]
    assert message.model_extra is not None
    assert message.model_extra["posfix"]["citations"][0]["document_ids"] == ["doc_0"]


def test_blocks_of_a_document_are_cited_as_blocks(client: anthropic.Anthropic):
    parts = ["It is known.", "The bridge of Arvo was built", "in 1911"]
    source: Any = {"type": "content", "content": [{"type": "text", "text": part} for part in parts]}
    message = client.messages.create(
        model="fake",
        max_tokens=50,
        messages=asked(document("", source=source)),
    )
    cited = []
    for block in message.content:
        assert isinstance(block, TextBlock)
        for citation in block.citations or ():
            assert isinstance(citation, CitationContentBlockLocation)
            cited.append((block.text, citation.start_block_index, citation.end_block_index, citation.cited_text))
    # The second sentence of the document goes from block 1 to the end of block 2.
    assert cited == [
        ("It is known.", 0, 1, "It is known."),
        ("in 1911", 1, 3, "The bridge of Arvo was builtin 1911"),
    ]


def test_a_stream_has_the_events_of_the_api_and_citations_with_places_on_both_sides(client: anthropic.Anthropic):
    with client.messages.stream(
        model="fake", max_tokens=50, messages=asked(document(HARBOUR), document(BRIDGE, title="Bridges"))
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    (block,) = message.content
    assert block.type == "text"
    assert block.text == ANSWER
    assert block.citations is not None
    (citation,) = block.citations
    assert isinstance(citation, CitationCharLocation)
    assert BRIDGE[citation.start_char_index : citation.end_char_index] == citation.cited_text == f"{ANSWER}."
    assert citation.model_extra == {"answer_start_index": 0, "answer_end_index": len(ANSWER)}
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens > 20
    assert message.usage.output_tokens == 8


def test_max_tokens_and_stop_sequences_end_the_answer(client: anthropic.Anthropic):
    create = client.messages.create
    short = create(model="fake", max_tokens=2, messages=asked(document(BRIDGE)))
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
    stopped = create(model="fake", max_tokens=20, messages=asked(document(BRIDGE)), stop_sequences=["was"])
    assert "".join(block.text for block in stopped.content if block.type == "text").strip() == "The bridge of Arvo"


def test_errors_have_anthropics_types(client: anthropic.Anthropic):
    create = client.messages.create
    with pytest.raises(anthropic.NotFoundError) as unknown:
        create(model="claude-9", max_tokens=5, messages=asked())
    assert unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="tools is not supported") as refused:
        create(model="fake", max_tokens=5, messages=asked(), tools=[{"name": "t", "input_schema": {"type": "object"}}])
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.RequestTooLargeError, match="at most 5"):
        create(model="fake", max_tokens=5, messages=asked(*[document("a")] * 6))
    with pytest.raises(anthropic.BadRequestError, match="context window"):
        create(model="fake", max_tokens=1990, messages=asked(document(BRIDGE)))
    with connect(str(client.base_url), api_key="wrong") as stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="fake", max_tokens=5, messages=asked())
    with connect(str(client.base_url), api_key=None, auth_token="right") as bearer:
        assert bearer.messages.create(model="fake", max_tokens=1, messages=asked()).stop_reason == "max_tokens"


def test_a_failure_in_the_stream_is_an_error_event():
    with serving(make_pipeline(FailingGenerator(2, GenerationError("secret")))) as url, connect(url) as client:
        stream = client.messages.create(model="fake", max_tokens=50, messages=asked(document(BRIDGE)), stream=True)
        with pytest.raises(anthropic.APIStatusError, match="the model failed") as failure:
            list(stream)
    assert failure.value.type == "api_error"
    assert "secret" not in str(failure.value)


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}


@pytest.mark.parametrize(
    ("fields", "status", "part"),
    [
        ({"max_tokens": 0}, 400, "max_tokens=0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "role 'tool'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "must be 'user'"),
        ({"messages": asked(document(BRIDGE), text=" ")}, 400, "last message is empty"),
        ({"messages": asked(PDF)}, 400, "'base64'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "output_config.format is not"),
        ({"output_format": {"type": "json_schema"}}, 400, "output_format is not supported"),
        ({"messages": asked({"type": "document"})}, 400, "has no source"),
        ({"messages": asked({"type": "image", "source": {"type": "url"}})}, 400, "'image'"),
        ({"system": [{"type": "document", "text": "x"}]}, 400, "system: a block of type 'document'"),
        ({"messages": asked({"type": "text", "text": "a", "citations": 5})}, 422, "citations"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 400, "thinking"),
    ],
)
def test_bad_requests_get_an_error_of_the_dialect(fields: dict[str, Any], status: int, part: str):
    client = client_for()
    response = client.post("/v1/messages", json={"model": "fake", "max_tokens": 5, "messages": asked(), **fields})
    assert response.status_code == status, response.text
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert part in error["error"]["message"]


def test_tokens_are_counted_without_an_answer(client: anthropic.Anthropic):
    messages = asked(document(BRIDGE), document(HARBOUR))
    counted = client.messages.count_tokens(model="fake", messages=messages, system="Be short.")
    message = client.messages.create(model="fake", max_tokens=50, messages=messages, system="Be short.")
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    retrieved = client.messages.count_tokens(model="fake", messages=[{"role": "user", "content": QUESTION}])
    assert retrieved.input_tokens > len(HARBOUR.split())
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="gpt-9", messages=messages)
    with pytest.raises(anthropic.UnprocessableEntityError):
        client.messages.count_tokens(model="fake", messages=[])


def test_the_stop_sequence_is_named_whole_streamed_and_cached():
    with serving(make_pipeline(retriever=ListRetriever(BRIDGE), cache=DictCache()), api_key="right") as url:
        client = connect(url)
        body: Any = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": QUESTION}]}
        for _ in range(2):  # the second answer is cached
            message = client.messages.create(**body, stop_sequences=["never", " was built"])
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " was built")
        with client.messages.stream(**body, stop_sequences=[" Arvo"]) as stream:
            streamed = stream.get_final_message()
        assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", " Arvo")
        unstopped = client.messages.create(**body, stop_sequences=["never"])
        assert (unstopped.stop_reason, unstopped.stop_sequence) == ("end_turn", None)
        cut = client.messages.create(**{**body, "max_tokens": 2}, stop_sequences=["never"])
        assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
        client.close()


def test_a_stream_begins_with_the_input_tokens(client: anthropic.Anthropic):
    messages = asked(document(BRIDGE))
    counted = client.messages.count_tokens(model="fake", messages=messages).input_tokens
    with client.messages.create(model="fake", max_tokens=50, messages=messages, stream=True) as stream:
        first = next(iter(stream))
    assert first.type == "message_start"
    assert first.message.usage.input_tokens == counted


def test_models_are_those_of_the_sdk(client: anthropic.Anthropic):
    (model,) = client.models.list()
    assert model == client.models.retrieve(model.id)
    assert (model.id, model.type, model.display_name, model.lifecycle) == ("fake", "model", "fake", "active")
    assert model.created_at.tzinfo is not None
    assert model.max_input_tokens


def test_search_results_are_passages_and_are_cited(client: anthropic.Anthropic):
    def result(text: str, title: str) -> Any:
        content = [{"type": "text", "text": part} for part in text.split(". ")]
        source = f"https://example.org/{title}"
        return {
            "type": "search_result", "source": source, "title": title, "content": content,
            "citations": {"enabled": True},
        }  # fmt: skip

    blocks = [result(HARBOUR, "harbour"), document("Nothing of the kind."), result("News. " + ANSWER, "bridge")]
    message = client.messages.create(model="fake", max_tokens=50, messages=asked(*blocks))
    cited = [block for block in message.content if isinstance(block, TextBlock) and block.citations]
    for index, block in enumerate(cited):
        assert block.citations is not None
        (citation,) = block.citations
        assert isinstance(citation, CitationsSearchResultLocation)
        assert (citation.search_result_index, citation.source) == (1, "https://example.org/bridge")
        assert citation.title == "bridge"
        assert (citation.start_block_index, citation.end_block_index) == (index, index + 1)
    assert len(cited) == 2
    bare: Any = {"type": "search_result", "source": "x", "title": "y"}
    with pytest.raises(anthropic.BadRequestError, match="without text"):
        client.messages.create(model="fake", max_tokens=50, messages=asked(bare))
