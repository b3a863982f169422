from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from langchain_core.documents import Document
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from pytest_httpserver import HTTPServer

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.answer import Question
from rag_posfix.errors import ConfigError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.settings import OpenTelemetrySettings, Settings, TelemetrySettings
from rag_posfix.telemetry.build import OFF, Telemetry, open_telemetry, question_tracer
from tests.support.toy_encoder import ToyEncoder

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "METRICS_ENDPOINT", "PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def collecting() -> Iterator[HTTPServer]:
    """A collector that takes OTLP over HTTP; its log has what it gets."""
    with HTTPServer() as server:
        server.expect_request(re.compile(""), headers={"content-type": "application/x-protobuf"}).respond_with_data()
        yield server


def close(telemetry: Telemetry) -> None:
    for provider in (telemetry.tracer_provider, telemetry.meter_provider):
        if provider is not None:
            provider.shutdown()  # type: ignore[attr-defined]


def ask(telemetry: Telemetry) -> str:
    generator = FakeGenerator(ToyEncoder())
    pipeline = Pipeline(generator, Assembler(ToyEncoder(), 8192), tracer=telemetry.question_tracer())
    return pipeline.ask(Question("Which river?", [Document(page_content="Rome lies on the Tiber.")])).text


def test_it_is_off_unless_it_is_configured():
    assert open_telemetry(Settings().telemetry) is OFF
    assert (OFF.tracer_provider, OFF.meter_provider, OFF.content) == (None, None, False)


@pytest.mark.slow
def test_opentelemetry_is_imported_only_when_it_is_used():
    code = (
        "import sys; from rag_posfix.settings import TelemetrySettings; "
        "from rag_posfix.telemetry.build import OFF, open_telemetry; import rag_posfix.pipeline.pipeline; "
        "assert open_telemetry(TelemetrySettings()) is OFF; OFF.question_tracer(); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("variable", [ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_a_standard_variable_turns_it_on(variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    telemetry = open_telemetry(TelemetrySettings())
    assert telemetry.tracer_provider is not None
    assert telemetry.meter_provider is None
    assert telemetry.content is False
    close(telemetry)


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        (TelemetrySettings(enabled=False), {"otel_exporter_otlp_endpoint": "http://127.0.0.1:9"}),
        (TelemetrySettings(), {"otel_exporter_otlp_endpoint": ""}),
        (TelemetrySettings(enabled=True), {"otel_sdk_disabled": "True"}),
    ],
    ids=["our setting", "empty variable", "disabled SDK"],
)
def test_what_turns_it_off(settings: TelemetrySettings, variables: dict[str, str]):
    assert open_telemetry(settings, OpenTelemetrySettings(**variables)) is OFF  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"otel_exporter_otlp_protocol": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL='grpc' is not supported; use 'http"),
        ({"otel_traces_exporter": "zipkin"}, "OTEL_TRACES_EXPORTER='zipkin' is not supported; use 'otlp' or 'none'"),
    ],
)
def test_what_is_not_supported_is_an_error_only_if_telemetry_was_enabled_by_our_setting(
    variables: dict[str, str], told: str, caplog: pytest.LogCaptureFixture
):
    standard = OpenTelemetrySettings(otel_exporter_otlp_endpoint="http://127.0.0.1:9", **variables)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=told):
        open_telemetry(TelemetrySettings(enabled=True), standard)
    with caplog.at_level(logging.WARNING):
        assert open_telemetry(TelemetrySettings(), standard) is OFF
    assert f"telemetry is off: {told}" in caplog.text


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.resources", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]
)
def test_a_missing_package_is_told_with_the_command_that_installs_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[telemetry\]'"):
        open_telemetry(TelemetrySettings(enabled=True))
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    assert open_telemetry(TelemetrySettings()) is OFF
    assert "pip install '.[telemetry]'" in caplog.text


def test_a_tracer_without_opentelemetry_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[telemetry\]'"):
        question_tracer()


def test_spans_and_metrics_reach_a_collector(monkeypatch: pytest.MonkeyPatch):
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url_for(""))
        telemetry = open_telemetry(TelemetrySettings())
        ask(telemetry)
        telemetry.flush(60)
        close(telemetry)
        bodies = {request.path: request.data for request, _ in collector.log}
    traces = ExportTraceServiceRequest.FromString(bodies["/v1/traces"])
    (resource,) = traces.resource_spans
    named = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert named["service.name"] == "rag_posfix"
    assert named["service.version"]
    spans = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(spans) == ["assemble", "chat fake", "decode", "prefill"]
    metrics = ExportMetricsServiceRequest.FromString(bodies["/v1/metrics"])
    names = [m.name for r in metrics.resource_metrics for s in r.scope_metrics for m in s.metrics]
    assert "gen_ai.server.time_to_first_token" in names


def test_the_name_of_the_service_comes_from_the_standard_variable(monkeypatch: pytest.MonkeyPatch):
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url_for(""))
        monkeypatch.setenv("OTEL_SERVICE_NAME", "answers")
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        telemetry = open_telemetry(TelemetrySettings())
        ask(telemetry)
        close(telemetry)
        ((request, _),) = collector.log
    assert request.path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(request.data).resource_spans
    named = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert named["service.name"] == "answers"


@pytest.mark.slow
def test_a_collector_that_is_down_costs_no_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")  # nobody listens on the discard port
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "4")  # for this test; ten seconds otherwise
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    telemetry = open_telemetry(TelemetrySettings(enabled=True))
    assert all(ask(telemetry) for _ in range(20))
    telemetry.flush(0.2)
    close(telemetry)


def test_an_exporter_that_does_not_give_up_is_waited_for_as_long_as_is_allowed():
    class Hanging(TracerProvider):
        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return over.wait(600)

    over, provider, before = threading.Event(), Hanging(), threading.enumerate()
    Telemetry(tracer_provider=provider, meter_provider=None).flush(0.05)
    (left,) = [thread for thread in threading.enumerate() if thread not in before]
    assert left.daemon, "the end of the process does not wait for it"
    over.set()
    left.join(60)
    provider.shutdown()
