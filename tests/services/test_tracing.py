"""The spans of requests to the service."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from opentelemetry.trace import SpanKind, StatusCode

from rag_posfix.contracts.request import Chunk, GenerationRequest
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.settings import Settings
from rag_posfix_api.app import create_app
from rag_posfix_api.http.metrics import JsonFormatter
from rag_posfix_api.keys.store import KeyStore
from tests.support.recorded_telemetry import RecordedTelemetry
from tests.support.serving import (
    BRIDGE,
    CHAT,
    HARBOUR,
    FailingGenerator,
    ListRetriever,
    WordReranker,
    chat,
    limits,
    make_pipeline,
    running,
)
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def client_for(recorded: RecordedTelemetry, pipeline: Pipeline | None = None, **fields: Any) -> TestClient:
    pipeline = pipeline or make_pipeline(
        retriever=ListRetriever(BRIDGE, HARBOUR), reranker=WordReranker(), candidates=2
    )
    return TestClient(create_app(Settings(), pipeline, limits(**fields), telemetry=recorded.telemetry))


STAGES: dict[str, Any] = {"retrieve": {}, "rerank": {}, "assemble": {}, "prefill": {}, "decode": {}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_server_span_and_every_stage_of_its_question_below_it(stream: bool):
    recorded = RecordedTelemetry()
    response = client_for(recorded).post(CHAT, json=chat(stream=stream), headers={"x-request-id": "r-1"})
    assert response.status_code == 200
    assert recorded.tree() == {f"POST {CHAT}": {"chat fake": STAGES}}
    server = recorded.span(f"POST {CHAT}")
    assert (server.kind, server.parent) == (SpanKind.SERVER, None)
    assert recorded.attributes(f"POST {CHAT}") == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "url.scheme": "http",
        "rag_posfix.request_id": "r-1",
    }
    question = recorded.span("chat fake")
    assert server.start_time <= question.start_time <= question.end_time <= server.end_time


def test_the_trace_of_the_caller_is_continued():
    recorded = RecordedTelemetry()
    client_for(recorded).post(CHAT, json=chat(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    server = recorded.span(f"POST {CHAT}")
    assert f"{server.parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for span in recorded.spans} == {TRACE}


@pytest.mark.parametrize("given", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01-\xff"])
def test_a_header_that_names_no_trace_begins_a_new_one(given: str):
    recorded = RecordedTelemetry()
    response = client_for(recorded).post(CHAT, json=chat(), headers={"traceparent": given.encode("latin-1")})
    assert response.status_code == 200
    assert recorded.span(f"POST {CHAT}").parent is None


def test_an_unsampled_trace_of_the_caller_is_not_recorded():
    recorded = RecordedTelemetry()
    client_for(recorded).post(CHAT, json=chat(), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert recorded.spans == []


def test_the_server_span_names_the_tenant_of_the_key(tmp_path: Path):
    recorded = RecordedTelemetry()
    _, key = KeyStore(tmp_path).create("acme")
    response = client_for(recorded, data_dir=tmp_path).post(CHAT, json=chat(), headers={"x-api-key": key})
    assert response.status_code == 200
    assert recorded.attributes(f"POST {CHAT}")["rag_posfix.tenant"] == "acme"


def test_no_text_of_the_client_or_the_model_is_in_a_span():
    recorded = RecordedTelemetry()
    client = client_for(recorded, api_key="key-xyzzy")
    headers = {"authorization": "Bearer key-xyzzy", "user-agent": "xyzzy", "baggage": "user=xyzzy"}
    body = chat(
        "Where is xyzzy?",
        documents=[{"id": "xyzzy", "title": "xyzzy", "text": "Where is xyzzy? Here is xyzzy."}],
        stop=["xyzzy!"],
        user="xyzzy",
    )
    answer = client.post(f"{CHAT}?q=xyzzy", json=body, headers=headers)
    assert "xyzzy" in answer.json()["choices"][0]["message"]["content"]
    client.post("/v1/rerank", json={"query": "xyzzy", "documents": ["xyzzy"]}, headers=headers)
    client.post(CHAT, json=chat("xyzzy", order="xyzzy"), headers=headers)
    client.get("/xyzzy", headers=headers)
    client.get("/v1/models/xyzzy", headers=headers)
    client.get("/v1/models", headers={"authorization": "Bearer xyzzy"})
    assert len(recorded.spans) > 10
    assert "xyzzy" not in recorded.text()


def test_a_rerank_request_has_a_span_for_reranking():
    recorded = RecordedTelemetry()
    client_for(recorded).post("/v1/rerank", json={"query": "bridge", "documents": [BRIDGE, HARBOUR]})
    assert recorded.tree() == {"POST /v1/rerank": {"rerank": {}}}
    assert recorded.attributes("rerank")["rag_posfix.documents"] == 2


@pytest.mark.parametrize(
    ("method", "path", "body", "name", "expected"),
    [
        ("POST", CHAT, chat(order="unheard of"), f"POST {CHAT}", (400, "unknown_name", StatusCode.UNSET)),
        ("GET", "/nothing/at/all", None, "GET", (404, "not_found", StatusCode.UNSET)),
        ("BREW", "/nothing", None, "HTTP", (404, "not_found", StatusCode.UNSET)),
    ],
)
def test_a_request_that_the_client_got_wrong_is_told_by_code_and_is_no_error_of_the_service(
    method: str, path: str, body: Any, name: str, expected: tuple[int, str, StatusCode]
):
    recorded = RecordedTelemetry()
    client_for(recorded).request(method, path, json=body)
    found = recorded.attributes(name)
    status = recorded.span(name).status.status_code
    assert (found["http.response.status_code"], found["error.type"], status) == expected


@pytest.mark.parametrize(("stream", "status"), [(False, 500), (True, 200)])
def test_a_failure_of_the_service_is_an_error_also_in_a_stream_that_had_begun(stream: bool, status: int):
    recorded = RecordedTelemetry()
    client = client_for(recorded, make_pipeline(FailingGenerator(1, ZeroDivisionError("xyzzy"))))
    assert client.post(CHAT, json=chat(documents=[BRIDGE], stream=stream)).status_code == status
    span = recorded.span(f"POST {CHAT}")
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "internal_error")
    assert recorded.attributes("decode" if stream else "prefill")["error.type"] == "ZeroDivisionError"
    assert "xyzzy" not in recorded.text()


def test_probes_have_no_spans():
    recorded = RecordedTelemetry()
    client = client_for(recorded)
    for path in ("/livez", "/readyz", "/health", "/healthz", "/metrics"):
        assert client.get(path).status_code == 200
    assert recorded.spans == []


def test_the_log_line_has_the_ids_of_the_span(caplog: pytest.LogCaptureFixture):
    recorded = RecordedTelemetry()
    with caplog.at_level(logging.INFO, logger="rag_posfix_api.access"):
        client_for(recorded).post(CHAT, json=chat(), headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    (line,) = [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "rag_posfix_api.access"]
    assert line["trace_id"] == TRACE
    assert line["span_id"] == f"{recorded.span(f'POST {CHAT}').context.span_id:016x}"


def test_a_stream_that_is_closed_within_the_service_is_no_error():
    class Slow(FakeGenerator):
        def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
            while True:
                yield Chunk("The ")
                time.sleep(0.01)

    recorded = RecordedTelemetry()
    with running(make_pipeline(Slow(ToyEncoder())), telemetry=recorded.telemetry) as (url, _):
        body = chat(documents=[BRIDGE], stream=True)
        with httpx2.stream("POST", url + CHAT, json=body, timeout=60) as response:
            for line in response.iter_lines():
                if "The" in line:
                    break
        wait_until(lambda: any(span.name.startswith("POST") for span in recorded.spans))
    for span in recorded.spans:
        assert span.status.status_code is StatusCode.UNSET, span.name
    assert recorded.attributes("decode")["error.type"] == "GenerationCancelled"


def test_a_pipeline_that_its_caller_traces_keeps_its_tracer_where_the_service_has_none():
    recorded = RecordedTelemetry()
    pipeline = make_pipeline(tracer=recorded.telemetry.question_tracer())
    client = TestClient(create_app(Settings(), pipeline, limits()))
    client.post(CHAT, json=chat(documents=[BRIDGE]))
    assert recorded.tree() == {"chat fake": {"assemble": {}, "prefill": {}, "decode": {}}}
