"""langchain's client of OpenAI's API against a real server on a loopback port."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import ANSWER, BRIDGE, HARBOUR, QUESTION, ListRetriever, make_pipeline, serving


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pipeline = make_pipeline(window=2000, retriever=ListRetriever(BRIDGE), embeddings=LetterEmbeddings())
    with serving(pipeline) as url:
        yield url + "/v1"


def chat_model(url: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"model": "fake", "base_url": url, "api_key": "unused", "max_retries": 0, **fields})


def test_a_plain_question_is_answered_from_the_index(url: str):
    answer = chat_model(url).invoke(QUESTION)
    assert answer.content == ANSWER
    assert answer.response_metadata["model_name"] == "fake"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] > len(BRIDGE)
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 0


def test_a_streamed_answer_is_the_same_in_pieces_and_has_the_usage(url: str):
    model = chat_model(url, stream_usage=True)
    pieces = list(model.stream(QUESTION))
    assert "".join(str(piece.content) for piece in pieces) == ANSWER
    assert sum(bool(piece.content) for piece in pieces) > 1
    usages = [piece.usage_metadata for piece in pieces if piece.usage_metadata is not None]
    assert [usage["output_tokens"] > 0 for usage in usages] == [True]


async def test_asynchronous_calls_answer_too(url: str):
    pieces = [str(piece.content) async for piece in chat_model(url).astream(QUESTION)]
    assert "".join(pieces) == ANSWER


def test_documents_and_methods_travel_in_extra_body(url: str):
    body = {
        "documents": [{"id": "h", "text": HARBOUR}, {"id": "b", "text": BRIDGE}],
        "posfix": {"mitigation": "parallel_windows", "order": "reverse"},
    }
    model = chat_model(url, extra_body=body, temperature=0, logprobs=True)
    answer = model.invoke("When did the harbour freeze?")
    assert answer.content == "The harbour froze in 1963"
    assert len(answer.response_metadata["logprobs"]["content"]) > 1
    assert "".join(str(piece.content) for piece in model.stream("When did the harbour freeze?")) == answer.content


def test_embeddings_are_those_of_the_model(url: str):
    # Without the option the client sends numbers of OpenAI's own tokenizer, which it loads from the network.
    client = OpenAIEmbeddings(model="minilm", base_url=url, api_key="unused", check_embedding_ctx_length=False)
    assert client.embed_query("a cab") == LetterEmbeddings().embed_query("a cab")
    assert client.embed_documents(["zz", "a cab"]) == LetterEmbeddings().embed_documents(["zz", "a cab"])
