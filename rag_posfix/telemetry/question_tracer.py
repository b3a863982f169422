"""Traces the questions of a pipeline with OpenTelemetry. Needs the package opentelemetry-api."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from langchain_core.documents import Document
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from rag_posfix import __version__
from rag_posfix.contracts.answer import Question
from rag_posfix.pipeline.protocols import Stage
from rag_posfix.telemetry.instruments import Instruments
from rag_posfix.telemetry.question_spans import QuestionSpans
from rag_posfix.telemetry.stage_span import stage_span


class OpenTelemetryTracer:
    """Writes the spans and metrics of questions. Implements ``pipeline.protocols.QuestionTracer``.

    Args:
        meter_provider: Creates the instruments; None writes no metrics.
    """

    def __init__(
        self, tracer_provider: TracerProvider, meter_provider: MeterProvider | None = None, *, content: bool = False
    ) -> None:
        self._tracer = tracer_provider.get_tracer("rag_posfix", __version__)
        self._instruments = None if meter_provider is None else Instruments(meter_provider)
        self._content = content

    def question(self, question: Question, model: str, *, stream: bool) -> QuestionSpans:
        """Return the trace of one question, a context manager."""
        return QuestionSpans(self._tracer, self._instruments, question, model, stream=stream, content=self._content)

    def stage(self, name: str, given: str, documents: Sequence[Document] = ()) -> AbstractContextManager[Stage]:
        """Return the context manager of a stage outside of a question, such as a rerank request."""
        return stage_span(self._tracer, None, name, given, documents, content=self._content)
