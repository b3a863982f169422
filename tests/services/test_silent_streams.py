"""Streams before their first token: their head is sent, and comments that every client passes over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import httpx2
import ollama
import openai
import pytest

from rag_posfix.contracts.request import Chunk, GenerationRequest
from rag_posfix.errors import GenerationError
from rag_posfix_api.runtime import jobs
from tests.support.serving import (
    ANSWER,
    BRIDGE,
    CHAT,
    CHAT_BODIES,
    MESSAGES,
    GatedGenerator,
    chat,
    in_flight,
    make_pipeline,
    post,
    serving,
)
from tests.support.waiting import wait_until

COMMENT = ": waiting"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "HEADERS_SECONDS", 0.01)
    monkeypatch.setattr(jobs, "PULSE_SECONDS", 0.01)


def silent_stream(path: str, pulse: bytes) -> bytes:
    """The bytes of a stream whose model answers after the third pulse."""
    generator, data = GatedGenerator(), b""
    body = {**CHAT_BODIES[path], "stream": True}
    with (
        serving(make_pipeline(generator)) as url,
        httpx2.stream("POST", url + path, json=body, timeout=20) as response,
    ):
        assert response.status_code == 200
        for piece in response.iter_raw():
            data += piece
            if data.count(pulse) >= 3:
                generator.gate.set()
    return data


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", CHAT_BODIES)
def test_head_and_comments_are_sent_before_the_first_token(path: str):
    pulse = b" " if path == "/api/chat" else b": waiting\n\n"
    data = silent_stream(path, pulse)
    assert data.startswith(pulse * 3)


def with_openai(data: bytes) -> str:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=SSE, content=data))
    client = openai.OpenAI(api_key="-", base_url="http://a", http_client=httpx2.Client(transport=transport))
    chunks = client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def with_openai_responses(data: bytes) -> str:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=SSE, content=data))
    client = openai.OpenAI(api_key="-", base_url="http://a", http_client=httpx2.Client(transport=transport))
    events = client.responses.create(model="fake", input="-", stream=True)
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def with_anthropic(data: bytes) -> str:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=SSE, content=data))
    client = anthropic.Anthropic(api_key="-", base_url="http://a", http_client=httpx2.Client(transport=transport))
    with client.messages.stream(model="fake", max_tokens=20, messages=MESSAGES) as stream:
        return "".join(stream.text_stream)


def with_ollama(data: bytes) -> str:
    client = ollama.Client("http://a", transport=httpx.MockTransport(lambda _: httpx.Response(200, content=data)))
    return "".join(chunk["message"]["content"] for chunk in client.chat("fake", MESSAGES, stream=True))


SSE = {"content-type": "text/event-stream"}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("path", "read"),
    [
        (CHAT, with_openai),
        ("/v1/responses", with_openai_responses),
        ("/v1/messages", with_anthropic),
        ("/api/chat", with_ollama),
    ],
)
def test_clients_read_the_same_answer_with_and_without_comments(path: str, read: Callable[[bytes], str]):
    pulse = b" " if path == "/api/chat" else b": waiting\n\n"
    data = silent_stream(path, pulse)
    assert read(data) == read(data.replace(pulse, b"") if pulse != b" " else data.lstrip()) != ""


@pytest.mark.usefixtures("impatient")
def test_an_error_after_the_head_ends_the_stream_as_an_event():
    class Failing(GatedGenerator):
        def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
            assert self.gate.wait(20)
            raise GenerationError("no luck")
            yield

    generator = Failing()
    with (
        serving(make_pipeline(generator)) as url,
        httpx2.stream("POST", url + CHAT, json=chat(documents=[BRIDGE], stream=True), timeout=20) as response,
    ):
        lines = response.iter_lines()
        assert next(lines) == COMMENT
        generator.gate.set()
        rest = [line for line in lines if line and line != COMMENT]
        assert response.status_code == 200
        assert "generation_failed" in rest[-1]
        wait_until(lambda: in_flight(url) == 0)


@pytest.mark.usefixtures("impatient")
def test_a_client_that_leaves_before_the_first_token_frees_its_place():
    generator = GatedGenerator()
    with serving(make_pipeline(generator)) as url:
        with httpx2.stream("POST", url + CHAT, json=chat(documents=[BRIDGE], stream=True), timeout=20) as response:
            assert next(response.iter_lines()) == COMMENT
        generator.gate.set()
        wait_until(lambda: in_flight(url) == 0)


def test_an_error_of_the_first_moment_keeps_its_status():
    generator = GatedGenerator()
    with (
        serving(make_pipeline(generator), max_concurrent=1, max_queue=0) as url,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(post, url)
        assert generator.entered.wait(60)
        assert post(url, stream=True, documents=["other"]).status_code == 429
        generator.gate.set()
        answer: Any = first.result().json()
        assert answer["choices"][0]["message"]["content"].startswith(ANSWER)
