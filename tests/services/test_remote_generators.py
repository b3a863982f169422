"""The service with a model on another server: ourselves behind ourselves, and servers that fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.settings import CacheSettings, RemoteSettings, Settings
from tests.support.serving import BRIDGE, CHAT, HARBOUR, QUESTION, chat, leaving, make_pipeline, serving
from tests.support.upstream import Reply, error, event, piece, streamed, upstream
from tests.support.waiting import wait_until

KEY = "sk-upstream"
SCORED = [{"id": "b", "text": BRIDGE, "relevance_score": 0.9}, {"id": "h", "text": HARBOUR, "relevance_score": 0.2}]

BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(model="default", documents=SCORED),
    "/v1/messages": {
        "model": "default", "max_tokens": 50,
        "messages": [{"role": "user", "content": [
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": BRIDGE}},
            {"type": "text", "text": QUESTION},
        ]}],
    },
    "/v2/chat": {
        "model": "default", "messages": [{"role": "user", "content": QUESTION}],
        "documents": [{"id": "b", "data": {"text": BRIDGE, "relevance_score": 0.9}}],
    },
    "/v1/responses": {"model": "default", "input": QUESTION, "documents": SCORED},
}  # fmt: skip


@contextmanager
def service(model: str, tmp_path: Path, **remote: Any) -> Iterator[str]:
    """A service whose documents need no reranker and whose model is on a server."""
    settings = Settings(
        model=model,
        mitigation="none",
        cache_dir=tmp_path,
        cache=CacheSettings(enabled=False),
        remote=RemoteSettings(**{"api_key": KEY, "retries": 0, **remote}),
    )
    pipeline = build_pipeline(settings)
    pipeline.reranker = None
    try:
        with serving(pipeline) as url:
            yield url
    finally:
        pipeline.close()


def message_of(path: str, body: dict[str, Any]) -> str:
    """The text for people, where the dialect of the path has it."""
    return body["message"] if path == "/v2/chat" else body["error"]["message"]


def test_the_service_behind_the_service(tmp_path: Path):
    """The fake generator answers the inner question from the prompt of the outer one; the key passes."""
    with serving(make_pipeline(), api_key=KEY) as inner, service(f"openai:fake@{inner}/v1", tmp_path) as outer:
        client = openai.OpenAI(base_url=f"{outer}/v1", api_key="unused", max_retries=0, timeout=60)
        messages: Any = [{"role": "user", "content": QUESTION}]
        whole = client.chat.completions.create(model="fake", messages=messages, extra_body={"documents": SCORED})
        pieces = client.chat.completions.create(
            model="fake", messages=messages, stream=True, extra_body={"documents": SCORED}
        )
        text = "".join(one.choices[0].delta.content or "" for one in pieces if one.choices)
        client.close()
    assert BRIDGE in (whole.choices[0].message.content or "")
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.prompt_tokens > 40


@pytest.mark.parametrize("path", BODIES)
def test_a_failing_upstream_is_502_in_the_dialect_of_the_path(path: str, tmp_path: Path, caplog):
    with upstream(error(500, f"secret of the prompt {BRIDGE}")) as server, service(server.model, tmp_path) as url:
        response = httpx2.post(url + path, json=BODIES[path], timeout=60)
    assert response.status_code == 502
    assert message_of(path, response.json()) == (
        "the server of the model failed; the server's log has the cause under this request id"
    )
    assert "answered with status 500" in caplog.text
    assert [text for text in (KEY, BRIDGE, "secret") if text in caplog.text + response.text] == []


def test_a_silent_upstream_is_504(tmp_path: Path):
    silent = streamed("x", pause_before=-1)
    with upstream(silent) as server, service(server.model, tmp_path, timeout_seconds=0.2) as url:
        response = httpx2.post(url + CHAT, json=BODIES[CHAT], timeout=60)
    assert response.status_code == 504
    assert "took too long" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("reply", "status", "code"),
    [
        (error(429, "busy"), 429, "overloaded"),
        (error(401, "wrong key"), 502, "upstream_failed"),
        (error(400, "maximum context length is 10 tokens"), 400, "context_length_exceeded"),
        (Reply(b"<html>", content_type="text/html"), 502, "upstream_failed"),
        (Reply(event(b"{broken")), 502, "upstream_failed"),
        (Reply(event(piece("In ")), cut=True), 502, "upstream_failed"),
    ],
)
def test_every_failure_has_its_status(reply: Reply, status: int, code: str, tmp_path: Path):
    with upstream(reply) as server, service(server.model, tmp_path) as url:
        response = httpx2.post(url + CHAT, json=BODIES[CHAT], timeout=60)
        assert httpx2.get(url + "/readyz", timeout=60).status_code == 200  # the next answer may succeed
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status == 429)


_CALL = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("delta", "finish", "reason"),
    [
        ({"content": None}, "length", "without any content; raise max_tokens"),
        ({"content": None, "tool_calls": [_CALL]}, "tool_calls", "called a tool"),
        ({"content": "", "tool_calls": [_CALL]}, "tool_calls", "called a tool"),
    ],
)
def test_an_answer_without_text_is_502_with_a_reason(
    delta: dict[str, Any], finish: str, reason: str, stream: bool, tmp_path: Path
):
    first = event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    reply = Reply(first, event(piece(finish=finish)), event(b"[DONE]"))
    with upstream(reply) as server, service(server.model, tmp_path) as url:
        response = httpx2.post(url + CHAT, json={**BODIES[CHAT], "stream": stream}, timeout=60)
    assert response.status_code == 502
    assert reason in response.json()["error"]["message"]
    assert server.url not in response.text


def test_a_server_that_is_busy_for_hours_costs_no_permit(tmp_path: Path):
    busy = error(429, "busy", retry_after="7200")
    with upstream(busy) as server, service(server.model, tmp_path, retries=2) as url:
        for _ in range(3):
            response = httpx2.post(url + CHAT, json=BODIES[CHAT], timeout=60)
            assert (response.status_code, response.headers["retry-after"]) == (429, "600")
        wait_until(lambda: "rag_posfix_running_answers 0.0" in httpx2.get(url + "/metrics", timeout=60).text)
    assert len(server.bodies) == 3


def test_a_stream_that_is_cut_ends_with_an_error_event(tmp_path: Path):
    with upstream(Reply(event(piece("In ")), cut=True)) as server, service(server.model, tmp_path) as url:
        response = httpx2.post(url + CHAT, json={**BODIES[CHAT], "stream": True}, timeout=60)
    assert response.status_code == 200
    assert "upstream_failed" in response.text
    assert "In " in response.text
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_request_upstream(stream: bool, tmp_path: Path):
    paused = streamed("In ", "1901.", pause_before=2 if stream else -1)
    with upstream(paused) as server, service(server.model, tmp_path) as url:
        with httpx2.Client(timeout=60) as client:
            if stream:
                with client.stream("POST", url + CHAT, json={**BODIES[CHAT], "stream": True}) as response:
                    assert any("In " in line for line in response.iter_lines())
            else:
                with leaving(url, **BODIES[CHAT]):
                    wait_until(lambda: server.bodies)
        assert server.gone.wait(60)
