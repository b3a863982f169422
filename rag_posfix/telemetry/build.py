"""Builds telemetry from settings, and the tracer of a pipeline. OpenTelemetry is imported when something is built."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_posfix import __version__
from rag_posfix.errors import ConfigError, missing_extra
from rag_posfix.pipeline.tracing import NOOP_TRACER, QuestionTracer
from rag_posfix.settings import OpenTelemetrySettings, TelemetrySettings

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Where traces and metrics go.

    Attributes:
        tracer_provider: Creates tracers; None writes no traces.
        meter_provider: Creates instruments; None writes no metrics.
        content: Whether questions, answers and ids of documents are recorded.
    """

    tracer_provider: TracerProvider | None = None
    meter_provider: MeterProvider | None = None
    content: bool = False

    def question_tracer(self) -> QuestionTracer:
        """Return the tracer for a pipeline; one that traces nothing if telemetry is off."""
        if self.tracer_provider is None and self.meter_provider is None:
            return NOOP_TRACER
        return question_tracer(self.tracer_provider, self.meter_provider, content=self.content)

    def flush(self, timeout_seconds: float) -> None:
        """Send what was not sent yet, for ``timeout_seconds`` at most. Call it before the process ends.

        The exporters try again for ten seconds each while a collector is down, whatever timeout they are given. So
        they run in threads that the end of the process does not wait for.
        """
        flushes = [
            threading.Thread(target=flush, name="rag-posfix-telemetry", daemon=True)
            for provider in (self.tracer_provider, self.meter_provider)
            if callable(flush := getattr(provider, "force_flush", None))
        ]
        for thread in flushes:
            thread.start()
        deadline = time.monotonic() + timeout_seconds
        for thread in flushes:
            thread.join(max(0.0, deadline - time.monotonic()))


OFF = Telemetry()
"""No traces and no metrics."""


def question_tracer(
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    *,
    content: bool = False,
) -> QuestionTracer:
    """Return a tracer for ``build_pipeline(tracer=...)`` or ``Pipeline(tracer=...)``.

    Args:
        tracer_provider: Creates the spans; the global provider of the process if both providers are None.
        meter_provider: Creates the metrics; the global provider of the process if both providers are None.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry import metrics, trace

        from rag_posfix.telemetry.spans import OpenTelemetryTracer
    except ImportError as error:
        raise missing_extra(error.name or "opentelemetry", "telemetry") from error
    if tracer_provider is None and meter_provider is None:
        tracer_provider, meter_provider = trace.get_tracer_provider(), metrics.get_meter_provider()
    return OpenTelemetryTracer(tracer_provider or trace.NoOpTracerProvider(), meter_provider, content=content)


def open_telemetry(settings: TelemetrySettings, standard: OpenTelemetrySettings | None = None) -> Telemetry:
    """Return the telemetry that settings and standard environment variables ask for.

    It is on if ``settings.enabled`` says so, or if ``enabled`` is None and a standard variable names an endpoint. What
    a standard variable alone asks for, and cannot be done, is a warning: such variables are often set for every
    program of a cluster.

    Args:
        standard: OpenTelemetry's variables; read from the environment if None.

    Raises:
        ConfigError: telemetry is enabled by our settings, and OpenTelemetry is not installed or a standard variable
            asks for something else than OTLP over HTTP.
    """
    variables = standard or OpenTelemetrySettings()
    enabled = variables.has_endpoint if settings.enabled is None else settings.enabled
    if not enabled or variables.disabled:
        return OFF
    try:
        _check(variables)
        return _open_exporters(variables, settings.content)
    except ConfigError as error:
        if settings.enabled:
            raise
        _log.warning("telemetry is off: %s", error)
        return OFF


def _check(variables: OpenTelemetrySettings) -> None:
    """Raise for unsupported values of variables."""
    for name in ("otel_traces_exporter", "otel_metrics_exporter"):
        if getattr(variables, name) not in ("otlp", "none"):
            raise ConfigError(f"{name.upper()}={getattr(variables, name)!r} is not supported; use 'otlp' or 'none'")
    if variables.otel_exporter_otlp_protocol != "http/protobuf":
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={variables.otel_exporter_otlp_protocol!r} is not supported; use "
            "'http/protobuf', which collectors take on port 4318"
        )


def _open_exporters(variables: OpenTelemetrySettings, content: bool) -> Telemetry:
    """Return telemetry that is sent as OTLP over HTTP. The exporters read further variables themselves."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise missing_extra(error.name or "opentelemetry", "telemetry") from error
    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):  # no variable gives a name
        resource = resource.merge(Resource({"service.name": "rag_posfix"}))
    resource = Resource({"service.version": __version__}).merge(resource)
    tracers = meters = None
    if variables.otel_traces_exporter == "otlp":
        tracers = SdkTracerProvider(resource=resource, shutdown_on_exit=False)  # as flush() says
        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    if variables.otel_metrics_exporter == "otlp":
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        meters = SdkMeterProvider([reader], resource, shutdown_on_exit=False)
    return Telemetry(tracers, meters, content)
