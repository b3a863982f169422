from __future__ import annotations

import json
import logging
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from langchain_core.documents import BaseDocumentCompressor

from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.tier import MemoryTier, TierStats
from rag_posfix.errors import ConfigError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.reranking import GuardedReranker
from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix_api.app import create_app
from rag_posfix_api.http import errors
from rag_posfix_api.http.metrics import JsonFormatter
from tests.support.serving import (
    BRIDGE,
    CHAT,
    HARBOUR,
    QUESTION,
    BrokenReranker,
    DictCache,
    FailingGenerator,
    WordReranker,
    chat,
    client_for,
    limits,
    make_pipeline,
)
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until

BUILD_PIPELINE = "rag_posfix.pipeline.build.build_pipeline"


def error_of(response: Any) -> dict[str, Any]:
    body = response.json()
    if response.request.url.path == "/v1/rerank":  # what Jina's clients show
        assert body.pop("detail") == body["error"]["message"]
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.parametrize(
    "path",
    ["/", "/docs", pytest.param("/openapi.json", marks=pytest.mark.slow), "/livez", "/readyz", "/health", "/healthz",
     "/metrics", "/v1/models", "/info"],
)  # fmt: skip
def test_head_has_status_and_headers_of_get_without_its_body(path: str):
    client = client_for()
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_of_a_route_that_takes_no_get_is_refused():
    response = client_for().head(CHAT)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_head_needs_the_key_that_get_needs():
    client = client_for(api_key="k")
    assert client.head("/v1/models").status_code == 401
    assert client.head("/v1/models", headers={"x-api-key": "k"}).status_code == 200


@pytest.mark.parametrize("path", ["/docs/", "/livez/", "/v1/rerank/"])
def test_no_path_is_redirected_to_the_host_that_a_request_names(path: str):
    response = client_for().get(path, headers={"host": "evil.example"}, follow_redirects=False)
    assert response.status_code == 404
    assert "location" not in response.headers


def test_pages_of_named_origins_alone_may_call_the_service_and_read_its_errors():
    client = client_for(api_key="k", cors_origins=("https://app.example",))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = client.options(CHAT, headers={"origin": "https://app.example", **asked})
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "https://app.example")
    unauthorized = client.post(CHAT, json=chat(), headers={"origin": "https://app.example"})
    assert (unauthorized.status_code, unauthorized.headers["access-control-allow-origin"]) == (
        401,
        "https://app.example",
    )
    foreign = client.options(CHAT, headers={"origin": "https://evil.example", **asked})
    assert foreign.status_code == 400
    assert "access-control-allow-origin" not in foreign.headers


def test_without_the_setting_no_page_of_another_origin_may_call_the_service():
    response = client_for().get("/livez", headers={"origin": "https://app.example"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("origin", ["*", "app.example", "https://app.example/", "https://*.example"])
def test_an_origin_that_is_no_origin_is_refused(origin: str):
    with pytest.raises(ConfigError, match="cors_origins"):
        ServiceSettings(cors_origins=(origin,))


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
@pytest.mark.slow
def test_a_compressed_body_is_refused_with_the_encoding_that_is_taken(encoding: str):
    response = client_for().post(CHAT, content=b"\x1f\x8b", headers={"content-encoding": encoding})
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "identity"
    assert error_of(response)["code"] == "unsupported_encoding"
    assert client_for().post(CHAT, json=chat(), headers={"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "fields", "status"),
    [({}, {"api_key": "k"}, 401), ({"content-encoding": "gzip"}, {}, 415), ({}, {"max_body_bytes": 1}, 413)],
)
def test_a_request_that_is_rejected_before_its_route_is_logged_with_it(
    headers: dict, fields: dict, status: int, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO, "rag_posfix_api.access"):
        assert client_for(**fields).post(CHAT, json=chat(), headers=headers).status_code == status
    (record,) = [record for record in caplog.records if record.name == "rag_posfix_api.access"]
    assert (record.fields["route"], record.fields["status"]) == (CHAT, status)


def test_a_given_pipeline_is_ready_at_once():
    client = client_for()
    for path in ("/readyz", "/health"):
        assert client.get(path).json() == {"status": "ready"}
    for path in ("/livez", "/healthz"):
        assert client.get(path).json() == {"status": "live"}


def test_while_the_model_loads_the_service_is_live_and_not_ready(monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()

    def build(settings: Settings, **_options: object) -> Pipeline:
        assert gate.wait(60)
        return make_pipeline()

    monkeypatch.setattr(BUILD_PIPELINE, build)
    with TestClient(create_app(Settings(), service=limits())) as client:
        assert client.get("/livez").status_code == 200
        for method, path in (("GET", "/readyz"), ("GET", "/health"), ("GET", "/v1/models"), ("POST", CHAT)):
            response = client.request(method, path, json=chat() if method == "POST" else None)
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert error_of(response)["code"] == "not_ready"
        assert "rag_posfix_ready 0.0" in client.get("/metrics").text
        gate.set()
        wait_until(lambda: client.get("/readyz").status_code == 200)
        assert client.post(CHAT, json=chat(documents=[BRIDGE])).status_code == 200
        assert "rag_posfix_ready 1.0" in client.get("/metrics").text


def test_a_model_that_has_broken_is_not_ready_any_more_and_says_why():
    """One that is split over several processes does when one of them ends."""

    class Breakable(FakeGenerator):
        failure = None

    generator = Breakable(ToyEncoder())
    client = client_for(make_pipeline(generator))
    assert client.get("/readyz").status_code == 200
    generator.failure = "the process of rank 1 of 2 ended"
    for method, path in (("GET", "/readyz"), ("POST", CHAT)):
        response = client.request(method, path, json=chat() if method == "POST" else None)
        assert response.status_code == 503
        assert "cannot answer any more: the process of rank 1 of 2 ended" in error_of(response)["message"]
    assert client.get("/livez").status_code == 200
    assert "rag_posfix_ready 0.0" in client.get("/metrics").text


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("model 'x' cannot be loaded:\n no such folder"), "model 'x' cannot be loaded: no such folder"),
        (ZeroDivisionError("secret detail"), "ZeroDivisionError, see the server's log"),
    ],
)
def test_a_model_that_cannot_be_loaded_leaves_a_live_service_with_a_reason(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def build(settings: Settings, **_options: object) -> Pipeline:
        raise error

    monkeypatch.setattr(BUILD_PIPELINE, build)
    with caplog.at_level(logging.ERROR), TestClient(create_app(Settings(), service=limits())) as client:
        wait_until(lambda: told in error_of(client.get("/readyz"))["message"])
        assert "\n" not in error_of(client.get("/readyz"))["message"]
        assert client.get("/livez").status_code == 200
    assert [record for record in caplog.records if told in record.getMessage()]


def test_shutting_down_does_not_wait_for_a_model_that_loads(monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()
    monkeypatch.setattr(BUILD_PIPELINE, lambda settings, **_: make_pipeline() if gate.wait(60) else None)
    with TestClient(create_app(Settings(), service=limits())) as client:
        assert client.get("/livez").status_code == 200
    assert not gate.is_set()
    gate.set()


def test_loading_warms_the_model(monkeypatch: pytest.MonkeyPatch):
    pipeline = make_pipeline(cache=DictCache())
    asked: list[str] = []
    ask = pipeline.ask
    monkeypatch.setattr(pipeline, "ask", lambda question: (asked.append(question.text), ask(question))[1])
    monkeypatch.setattr(BUILD_PIPELINE, lambda settings, **_: pipeline)
    with TestClient(create_app(Settings(), service=limits())) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)
    assert asked == ["Is the service warm?"]
    assert pipeline.cache.entries == {}  # type: ignore[union-attr]


def test_models_are_listed_and_described():
    client = client_for()
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 8192)
    assert client.get("/v1/models/fake").json() == model
    assert client.get("/v1/models/default").json()["id"] == "fake"
    response = client.get("/v1/models/owner/name")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_unknown_paths_and_wrong_methods_have_the_same_shape():
    client = client_for()
    response = client.get("/v1/nothing")
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
    response = client.get(CHAT)
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert client.put("/v1/collections/a").headers["allow"] == "DELETE, GET"  # routes of their own


@pytest.mark.parametrize(
    ("content", "status", "part"),
    [
        (b"{", 400, "the body is no JSON"),
        (b"", 422, "field required"),
        (b"[]", 422, "body: input should be a valid dictionary"),
        (b"\xff\xfe\xfd", 400, "not UTF-8"),
        (b"[" * 100_000, 413, "at most 50000"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', 422, "temperature"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}', 422, "temperature"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "seed": 1' + b"0" * 5000 + b"}", 400, "body"),
    ],
)
def test_malformed_bodies_are_the_clients_fault(content: bytes, status: int, part: str):
    response = client_for().post(CHAT, content=content, headers={"content-type": "application/json"})
    assert (response.status_code, part in error_of(response)["message"]) == (status, True), response.text
    assert "\n" not in error_of(response)["message"]


def test_a_body_that_is_not_sent_as_json_is_refused():
    response = client_for().post(CHAT, content=json.dumps(chat()), headers={"content-type": "text/plain"})
    assert response.status_code == 422
    assert "content-type: application/json" in error_of(response)["message"]


def test_request_ids_are_echoed_or_made_on_every_response():
    client = client_for(api_key="key")
    for path in ("/livez", "/v1/models", "/nothing"):
        assert client.get(path, headers={"x-request-id": "abc-1.2:3_4"}).headers["x-request-id"] == "abc-1.2:3_4"
        made = {
            client.get(path, headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("a b", "x" * 200, "")
        }
        assert len(made) == 3
        assert all(len(identity) == 32 for identity in made)


def test_the_key_opens_everything_and_probes_are_open():
    client = client_for(api_key="kéy")
    for path in ("/livez", "/readyz", "/health", "/healthz", "/docs", "/docs/swagger-ui.css", "/openapi.json"):
        assert client.get(path).status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic kéy".encode()}):
        for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/nothing"), ("GET", "/metrics")):
            response = client.request(method, path, headers=headers)  # type: ignore[arg-type]
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"
    for scheme in ("Bearer", "bearer"):
        assert client.get("/v1/models", headers={"authorization": f"{scheme} kéy".encode()}).status_code == 200


def test_an_error_that_nothing_foresaw_is_a_500_without_its_text(caplog: pytest.LogCaptureFixture):
    client = client_for(make_pipeline(FailingGenerator(0, ZeroDivisionError(f"secret {QUESTION}"))))
    with caplog.at_level(logging.INFO):
        response = client.post(CHAT, json=chat(documents=[BRIDGE]))
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert response.headers["x-request-id"]
    lines = "\n".join(JsonFormatter().format(record) for record in caplog.records)
    assert "ZeroDivisionError" in lines
    assert "serving.py" in lines
    assert QUESTION not in lines


def test_two_apps_in_one_process_count_apart():
    first, second = client_for(), client_for()
    first.post(CHAT, json=chat(documents=[BRIDGE]))
    assert 'route="/v1/chat/completions"' in first.get("/metrics").text
    assert 'route="/v1/chat/completions"' not in second.get("/metrics").text


def test_the_metrics_separate_misses_from_skipped_lookups():
    class Resting(MemoryTier):
        def stats(self) -> TierStats:
            return replace(super().stats(), name="redis", skipped=7, errors=1, available=False)

    cache = TieredAnswerCache([MemoryTier(max_entries=10), Resting(max_entries=10)])
    client = client_for(make_pipeline(cache=cache))
    for _ in range(2):
        client.post(CHAT, json=chat(documents=[BRIDGE]))
    text = client.get("/metrics").text
    for line in (
        'rag_posfix_cache_tier_lookups_total{cache="answers",result="hit",tier="memory"} 1.0',
        'rag_posfix_cache_tier_lookups_total{cache="answers",result="miss",tier="redis"} 1.0',
        'rag_posfix_cache_tier_lookups_total{cache="answers",result="skipped",tier="redis"} 7.0',
        'rag_posfix_cache_tier_errors_total{cache="answers",tier="redis"} 1.0',
        'rag_posfix_cache_tier_available{cache="answers",tier="memory"} 1.0',
        'rag_posfix_cache_tier_available{cache="answers",tier="redis"} 0.0',
    ):
        assert line in text, line


def test_a_request_leaves_one_json_line_without_any_text_of_client_or_model(caplog: pytest.LogCaptureFixture):
    client = client_for()
    with caplog.at_level(logging.INFO):
        client.post(CHAT, json=chat(documents=[BRIDGE]), headers={"x-request-id": "r1"})
        client.post(CHAT, json=chat(order="secret order"), headers={"x-request-id": "r2"})
        client.get("/secret", headers={"x-request-id": "r3"})
        client.get("/openapi.json", headers={"x-request-id": "r4"})
    lines = [JsonFormatter().format(record) for record in caplog.records if record.name.startswith("rag_posfix_api.")]
    answered, refused, unknown, schema = map(json.loads, lines)
    assert answered["request_id"] == "r1"
    assert (answered["route"], answered["status"], answered["method"]) == (CHAT, 200, "POST")
    assert (answered["mitigation"], answered["order"], answered["cache"]) == ("context_experts", "relevance", "off")
    assert answered["prompt_tokens"] > answered["completion_tokens"] == 8
    assert {"assemble", "queue", "prefill", "decode"} <= set(answered["stage_seconds"])
    assert (refused["status"], refused["error"]) == (400, "unknown_name")
    assert (unknown["route"], unknown["status"]) == ("unmatched", 404)
    assert (schema["route"], schema["status"]) == ("/openapi.json", 200)
    everything = "\n".join(JsonFormatter().format(record) for record in caplog.records if "httpx" not in record.name)
    for text in ("bridge", "Arvo", "secret"):
        assert text not in everything


def test_probes_are_not_in_the_log_at_info(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="rag_posfix_api"):
        client_for().get("/livez")
    assert not [record for record in caplog.records if record.name.startswith("rag_posfix_api")]


def test_rerank_scores_best_first_and_keeps_the_order_of_equals():
    client = client_for(make_pipeline(reranker=WordReranker()))
    documents = [HARBOUR, {"text": BRIDGE}, "nothing", HARBOUR]
    body = client.post(
        "/v1/rerank", json={"model": "any", "query": "the bridge of Arvo", "documents": documents}
    ).json()
    assert [result["index"] for result in body["results"]] == [1, 0, 3, 2]
    assert body["results"][0] == {"index": 1, "relevance_score": 1.0, "document": {"text": BRIDGE}}
    texts = ("the bridge of Arvo", HARBOUR, BRIDGE, "nothing", HARBOUR)  # a token for each character
    assert body["usage"] == {"total_tokens": (total := sum(map(len, texts))), "prompt_tokens": total}
    request = {"query": "the bridge", "documents": documents, "top_n": 1, "return_documents": False}
    assert client.post("/v1/rerank", json=request).json()["results"] == [{"index": 1, "relevance_score": 1.0}]
    assert client.post("/v1/rerank", json={"query": "x", "documents": []}).json()["results"] == []


class FailingReranker(BaseDocumentCompressor):
    def compress_documents(self, documents: Any, query: str, callbacks: Any = None) -> Any:
        raise RuntimeError


def test_a_reranker_that_fails_costs_no_answer_and_is_counted():
    client = client_for(make_pipeline(reranker=GuardedReranker(reranker=FailingReranker())))
    counter = "rag_posfix_reranking_failures_total"
    assert counter + "{" not in client.get("/metrics").text
    assert client.post(CHAT, json=chat(documents=["a"])).status_code == 200
    response = client.post("/v1/rerank", json={"query": "q", "documents": ["a"]})
    assert (response.status_code, error_of(response)["code"]) == (500, "reranking_failed"), "there is no score to give"
    text = client.get("/metrics").text
    assert f'{counter}{{reason="error",reranker="FailingReranker"}} 2.0' in text
    assert f'{counter}{{reason="timeout",reranker="FailingReranker"}} 0.0' in text
    assert 'rag_posfix_reranking_failures_in_a_row{reranker="FailingReranker"} 2.0' in text


def test_a_reranker_that_fails_at_every_request_is_a_warning_of_each_answer_and_a_detail_of_readiness():
    client = client_for(make_pipeline(reranker=GuardedReranker(reranker=FailingReranker())))
    message = "reranker FailingReranker failed (RuntimeError); the documents keep their order"
    for _ in range(3):
        assert client.get("/readyz").json() == {"status": "ready"}
        assert client.post(CHAT, json=chat(documents=["a"])).json()["warnings"] == [message]
    response = client.get("/readyz")
    assert response.status_code == 200, "questions are answered"
    assert re.fullmatch(
        r"reranker FailingReranker failed 3 times in a row since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \(RuntimeError\); "
        "documents keep their order",
        response.json()["detail"],
    )
    events = client.post(CHAT, json=chat(documents=["a"], stream=True)).text
    assert message in events
    asked = {"model": "default", "messages": [{"role": "user", "content": QUESTION}], "documents": ["a"]}
    assert client.post("/v2/chat", json=asked).json()["posfix"]["warnings"] == [message]
    orders = client.post("/v1/evaluate/order", json={"question": "q", "documents": ["a", "b"]}).json()
    assert orders["warnings"] == [message], "once for both orders"


def test_rerank_without_a_reranker_or_with_a_broken_one(caplog: pytest.LogCaptureFixture):
    request = {"query": "my secret", "documents": ["a"]}
    response = client_for().post("/v1/rerank", json=request)
    assert (response.status_code, error_of(response)["code"]) == (400, "unsupported")
    assert "no reranker" in error_of(response)["message"]
    broken = client_for(make_pipeline(reranker=BrokenReranker()))
    for response in (broken.post("/v1/rerank", json=request), broken.post(CHAT, json=chat(documents=["a"]))):
        assert (response.status_code, error_of(response)["code"]) == (500, "reranking_failed")
        assert "no luck" not in response.text
    assert "no luck" not in caplog.text


def test_service_settings_come_from_the_environment_and_are_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAG_POSFIX_SERVICE_PORT", "9000")
    monkeypatch.setenv("RAG_POSFIX_SERVICE_API_KEY", "secret")
    settings = ServiceSettings()
    assert settings.port == 9000
    assert "secret" not in repr(settings)
    for fields in ({"port": 70000}, {"max_concurrent": 0}, {"api_key": ""}, {"unknown": 1}):
        with pytest.raises(ConfigError):
            ServiceSettings(**fields)  # type: ignore[arg-type]


def test_every_code_that_is_raised_has_a_status():
    files = Path(errors.__file__).parents[1].rglob("*.py")
    codes = {code for file in files for code in re.findall(r'\bcode="(\w+)"', file.read_text("utf-8"))}
    assert len(codes) > 20
    assert codes <= set(errors.ERRORS)
