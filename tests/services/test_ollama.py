"""Ollama's chat and tags, with its real client and with bodies as pages send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import ollama
import pytest

from rag_posfix.contracts.answer import Answer
from rag_posfix.contracts.request import Usage
from rag_posfix.errors import GenerationError
from rag_posfix_api.dialects.ollama import OllamaRenderer
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import (
    ANSWER,
    BRIDGE,
    HARBOUR,
    QUESTION,
    FailingGenerator,
    ListRetriever,
    make_pipeline,
    serving,
)

MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(make_pipeline(retriever=ListRetriever(BRIDGE))) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(host=url, timeout=60) as client:
        yield client


def post(url: str, **fields: Any) -> httpx2.Response:
    body = {"model": "fake", "messages": MESSAGES, **fields}
    return httpx2.post(url + "/api/chat", json=body, timeout=60)


def test_the_client_gets_a_whole_answer(client: ollama.Client):
    response = client.chat(model="fake:latest", messages=MESSAGES, options={"num_predict": 3, "num_ctx": 2048})
    assert response.message.content == "The bridge of "
    assert (response.model, response.done, response.done_reason) == ("fake:latest", True, "length")
    assert response.eval_count == 3
    assert response.prompt_eval_count
    assert response.total_duration is not None


@pytest.mark.parametrize("option", [{"repeat_penalty": 1.1}, {"min_p": 0.1}, {"frequency_penalty": 0.5}])
def test_an_option_that_would_change_the_answer_and_has_no_effect_here_is_refused_by_name(url: str, option: dict):
    response = post(url, options=option)
    assert response.status_code == 400
    assert f"options.{next(iter(option))} is not supported here" in response.json()["error"]


def test_a_body_without_stream_is_answered_in_lines(url: str):
    response = post(url, documents=[HARBOUR, BRIDGE], posfix={"order": "reverse"}, keep_alive="5m", format="")
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert set(lines[0]) == {"model", "created_at", "message", "done"}
    assert lines[0]["message"] == {"role": "assistant", "content": "The "}
    assert lines[-1]["posfix"]["order"] == "reverse"
    assert [document["id"] for document in lines[-1]["posfix"]["documents"]] == ["doc_1", "doc_0"]


def test_the_last_line_has_the_time_of_each_stage_in_nanoseconds():
    timings = {"retrieve": 0.5, "prefill": 0.25, "decode": 2.0}
    answer = Answer("Yes", (), (), Usage(7, 1), False, "none", "relevance", "stop", timings=timings)
    last = OllamaRenderer("fake", chat=True).whole(answer)
    assert (last["prompt_eval_count"], last["prompt_eval_duration"]) == (7, 250_000_000)
    assert (last["eval_count"], last["eval_duration"]) == (1, 2_000_000_000)
    assert (last["load_duration"], last["total_duration"]) == (0, 2_750_000_000)


def test_errors_are_those_of_the_client(client: ollama.Client):
    with pytest.raises(ollama.ResponseError, match="'gpt-9' is not served here") as refused:
        client.chat(model="gpt-9", messages=MESSAGES)
    assert refused.value.status_code == 404


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"tools": [{"type": "function"}]}, 400),
        ({"think": True}, 400),
        ({"messages": [{"role": "user", "content": "Who?", "images": ["aGk="]}]}, 400),
        ({"options": {"temperature": 9}}, 400),
        ({"messages": "hello"}, 422),
    ],
)
def test_errors_have_ollamas_form(url: str, fields: dict[str, Any], status: int):
    response = post(url, **fields)
    assert response.status_code == status
    assert set(response.json()) == {"error"}
    assert isinstance(response.json()["error"], str)


def test_a_failure_in_a_stream_is_its_last_line():
    with serving(make_pipeline(FailingGenerator(2, GenerationError("secret")))) as url:
        lines = post(url, documents=[BRIDGE]).text.splitlines()
        assert "secret" not in lines[-1]
        assert "the model failed" in json.loads(lines[-1])["error"]
        with ollama.Client(host=url) as client, pytest.raises(ollama.ResponseError, match="the model failed"):
            list(client.chat(model="fake", messages=MESSAGES, stream=True))


RECORDED = {"user-agent": "litellm/1.83.0", "accept": "*/*"}
"""Headers of litellm's requests for a chat or an answer: none says what the body is."""


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_whole_and_streamed_as_recorded(url: str, stream: bool):
    message = {"role": "user", "content": QUESTION, "images": []}
    bodies: dict[str, dict[str, Any]] = {
        "/api/chat": {"model": "fake", "messages": [message], "options": {}, "stream": stream},
        "/api/generate": {"model": "fake", "prompt": QUESTION, "options": {}, "stream": stream, "images": []},
    }
    for path, body in bodies.items():
        response = httpx2.post(url + path, content=json.dumps(body).encode(), headers=RECORDED, timeout=60)
        assert "content-type" not in response.request.headers
        lines = [json.loads(line) for line in response.text.splitlines()]
        texts = [line["message"]["content"] if path == "/api/chat" else line["response"] for line in lines]
        assert ("".join(texts), len(lines) > 1, lines[-1]["done"]) == (ANSWER, stream, True)


def test_a_form_of_curl_is_read_and_that_of_another_site_is_not(url: str):
    body = json.dumps({"model": "fake", "messages": MESSAGES}).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert httpx2.post(url + "/api/chat", content=body, headers=form, timeout=60).status_code == 200
    for page in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        response = httpx2.post(url + "/api/chat", content=body, headers={**form, **page}, timeout=60)
        assert (response.status_code, set(response.json())) == (422, {"error"})


def test_the_client_generates(client: ollama.Client):
    whole = client.generate(model="fake", prompt=QUESTION, options={"num_predict": 3})
    assert (whole.response, whole.done_reason, whole.eval_count) == ("The bridge of ", "length", 3)
    chunks = list(client.generate(model="fake", prompt=QUESTION, system="Be short.", stream=True))
    assert "".join(chunk.response or "" for chunk in chunks) == ANSWER
    with pytest.raises(ollama.ResponseError, match="raw is not supported"):
        client.generate(model="fake", prompt=QUESTION, raw=True)


def test_the_client_shows_the_model(client: ollama.Client, url: str):
    shown = client.show("fake:latest")
    assert shown.modelinfo is not None
    assert shown.modelinfo["rag_posfix.context_length"] >= 100
    assert shown.capabilities == ["completion"]
    by_name = httpx2.post(url + "/api/show", json={"name": "fake"}, timeout=60)  # as litellm asks
    assert by_name.json()["model_info"] == shown.modelinfo
    with pytest.raises(ollama.ResponseError, match="'gpt-9' is not served here"):
        client.show("gpt-9")


def test_the_version_and_errors_of_unknown_paths(url: str):
    assert set(httpx2.get(url + "/api/version", timeout=60).json()) == {"version"}
    unknown = httpx2.post(url + "/api/pull", json={"model": "fake"}, timeout=60)
    assert (unknown.status_code, set(unknown.json())) == (404, {"error"})
    assert "nothing is served at POST '/api/pull'" in unknown.json()["error"]


@pytest.fixture(scope="module")
def embedding_client() -> Iterator[ollama.Client]:
    with (
        serving(make_pipeline(embeddings=LetterEmbeddings())) as url,
        ollama.Client(host=url, timeout=20) as client,
    ):
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/api/generate", {}), ("/api/chat", {"messages": []})])
@pytest.mark.parametrize(("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (0, "unload")])
def test_a_request_without_a_question_loads_the_model(url: str, path, body, stream, keep_alive, reason):
    response = httpx2.post(
        url + path, json={"model": "fake", "stream": stream, "keep_alive": keep_alive, **body}, timeout=60
    )
    answer = response.json()
    assert (answer["done"], answer["done_reason"], answer["model"]) == (True, reason, "fake")
    assert answer.get("response", answer.get("message", {}).get("content")) == ""


def test_the_client_lists_the_model_in_memory(client: ollama.Client):
    (model,) = client.ps().models
    assert model.model == "fake"
    (listed,) = client.list().models
    assert (listed.model, listed.digest) == ("fake", model.digest)
    assert listed.modified_at is not None
    assert model.context_length == 8192


def test_the_client_embeds_one_text_and_several(embedding_client: ollama.Client):
    expected = [LetterEmbeddings().embed_query(text) for text in ("a cab", "zz")]
    answer = embedding_client.embed(model="minilm:latest", input=["a cab", "zz"])
    assert [list(vector) for vector in answer.embeddings] == expected
    assert answer.model == "minilm:latest"
    assert answer.prompt_eval_count
    assert [list(vector) for vector in embedding_client.embed(model="default", input="a cab").embeddings] == expected[
        :1
    ]
