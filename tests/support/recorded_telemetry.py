"""Telemetry that is kept in memory by OpenTelemetry's own exporters for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rag_posfix.telemetry.build import Telemetry


class RecordedTelemetry:
    """Spans and metrics as the SDK exports them."""

    def __init__(self, *, content: bool = False) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracer_provider = TracerProvider(shutdown_on_exit=False)
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.telemetry = Telemetry(self.tracer_provider, meters, content)

    @property
    def spans(self) -> list[ReadableSpan]:
        """The spans that have ended, by their start."""
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def span(self, name: str) -> ReadableSpan:
        """The only span of a name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def attributes(self, name: str) -> Mapping[str, Any]:
        """The attributes of the only span of a name."""
        return dict(self.span(name).attributes or {})

    def tree(self) -> dict[str, Any]:
        """The names of all spans, nested: ``{"parent": {"child": {}}}``."""
        known = {span.context.span_id for span in self.spans if span.context}
        roots = [span for span in self.spans if span.parent is None or span.parent.span_id not in known]
        return {span.name: self._below(span) for span in roots}

    def text(self) -> str:
        """Everything that would be sent of the spans, as JSON."""
        return "\n".join(span.to_json() for span in self.spans)

    def metrics(self) -> dict[str, Any]:
        """The data points of each metric."""
        data = self._reader.get_metrics_data()
        found = [] if data is None else [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics]
        return {metric.name: list(metric.data.data_points) for metric in found}

    def _below(self, parent: ReadableSpan) -> dict[str, Any]:
        below = [
            span
            for span in self.spans
            if span.parent is not None and parent.context is not None and span.parent.span_id == parent.context.span_id
        ]
        return {span.name: self._below(span) for span in below}
