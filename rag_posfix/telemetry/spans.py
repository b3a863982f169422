"""Spans and metrics of questions: a span for each question, and one for each stage of it.

    chat MODEL
    ├── retrieve
    ├── rerank
    ├── assemble
    ├── prefill
    └── decode

A generator works in other threads and reports its times when the answer is complete. So the spans of prefill and
decode are written afterwards, with the measured times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

from langchain_core.documents import Document
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, TracerProvider

from rag_posfix import __version__
from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.contracts.request import Generation
from rag_posfix.errors import GenerationCancelled
from rag_posfix.pipeline.tracing import Stage
from rag_posfix.telemetry import names

_NANO = 1_000_000_000

# The bounds that the conventions recommend for each metric.
_DURATION_BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Instruments:
    """Histograms of durations in seconds."""

    def __init__(self, provider: MeterProvider) -> None:
        meter = provider.get_meter("rag_posfix")
        self._duration = meter.create_histogram(
            names.DURATION,
            "s",
            "Time of one answer, cached ones included.",
            explicit_bucket_boundaries_advisory=_DURATION_BOUNDS,
        )
        self._first_token = meter.create_histogram(
            names.FIRST_TOKEN,
            "s",
            "Time from the question to the first token that the model chose.",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN_BOUNDS,
        )
        self._per_token = meter.create_histogram(
            names.PER_TOKEN,
            "s",
            "Time for each token of an answer after its first.",
            explicit_bucket_boundaries_advisory=_PER_TOKEN_BOUNDS,
        )

    def answered(
        self, answer: Answer, seconds: float, first_token: float | None, attributes: Mapping[str, str]
    ) -> None:
        """Record a complete answer; ``first_token`` is the time to the first token, None for a cached answer."""
        self._duration.record(seconds, attributes)
        if first_token is None:
            return
        self._first_token.record(first_token, attributes)
        decode_steps, decode = answer.usage.completion_tokens - 1, answer.timings.get("decode")
        if decode_steps > 0 and decode is not None:
            self._per_token.record(decode / decode_steps, attributes)

    def failed(self, error_type: str, seconds: float, attributes: Mapping[str, str]) -> None:
        """Record a question without an answer."""
        self._duration.record(seconds, {**attributes, names.ERROR_TYPE: error_type})


class OpenTelemetryTracer:
    """Writes the spans and metrics of questions. Implements ``pipeline.tracing.QuestionTracer``.

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

    def stage(self, name: str, question: str, documents: Sequence[Document] = ()) -> AbstractContextManager[Stage]:
        """Return the context manager of a stage outside of a question, such as a rerank request."""
        return stage_span(self._tracer, None, name, question, documents, content=self._content)


class QuestionSpans:
    """The trace of one question. Implements ``pipeline.tracing.QuestionTrace``.

    No text is recorded unless ``content`` is set: of an error only its type, of documents only their number.

    Args:
        tracer: Starts the spans. The parent is the current span.
        instruments: The metrics, or None.
        content: Whether the question, the answer and the ids of documents are recorded.
    """

    def __init__(
        self,
        tracer: Tracer,
        instruments: Instruments | None,
        question: Question,
        model: str,
        *,
        stream: bool,
        content: bool,
    ) -> None:
        self._tracer = tracer
        self._instruments = instruments
        self._content = content
        self._stream = stream
        self._common = {names.OPERATION: "chat", names.PROVIDER: names.PROVIDER_NAME, names.REQUEST_MODEL: model}
        self._started = time.perf_counter()
        self._begun = time.time_ns()
        self._first_token: float | None = None
        self._span = tracer.start_span(f"chat {model}", kind=SpanKind.INTERNAL, attributes=self._common)
        self._context = trace.set_span_in_context(self._span)
        if self._span.is_recording():
            self._span.set_attributes(_request_attributes(question, stream))
            if content:
                self._span.set_attribute(names.INPUT_MESSAGES, _messages(question))

    def __enter__(self) -> QuestionSpans:
        """Return the trace."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the span of the question, as failed after an exception."""
        if isinstance(error, GeneratorExit):
            self._span.set_attribute(names.CLOSED_EARLY, True)
        elif error is not None:
            fail(self._span, error)
            if self._instruments is not None:
                self._instruments.failed(type(error).__name__, time.perf_counter() - self._started, self._common)
        self._span.end()

    def answered(self, answer: Answer) -> None:
        """Record the answer: its tokens, how it ended and where it came from."""
        if self._instruments is not None:
            seconds = time.perf_counter() - self._started
            first = None if answer.cached else self._first_token
            self._instruments.answered(answer, seconds, first, self._common)
        if not self._span.is_recording():
            return
        self._span.set_attributes(_answer_attributes(answer))
        if self._stream and self._first_token is not None:
            self._span.set_attribute(names.TIME_TO_FIRST_CHUNK, self._first_token)
        if self._content:
            self._span.set_attribute(names.OUTPUT_MESSAGES, _message("assistant", answer.text, answer.finish_reason))

    @contextmanager
    def stage(self, name: str, question: str, documents: Sequence[Document] = ()) -> Iterator[Stage]:
        """Return the context manager of a stage: ``retriever``, ``reranker``, ``assembler`` or ``generator``."""
        if name == "generator":
            generation = _GenerationSpans(self, time.time_ns())
            try:
                yield generation
            except BaseException as error:
                generation.stopped(error)
                raise
            return
        with stage_span(self._tracer, self._context, name, question, documents, content=self._content) as stage:
            yield stage

    def write(
        self,
        name: str,
        start: int,
        end: int,
        attributes: Mapping[str, int | float] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Write a span that is over, ``prefill`` or ``decode``; times are nanoseconds since 1970."""
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=start)
        if isinstance(error, GeneratorExit):
            span.set_attribute(names.CLOSED_EARLY, True)
        elif error is not None:
            fail(span, error)
        span.end(max(start, end))

    def first_token(self, time_ns: int) -> None:
        """Note when the first token came, in nanoseconds since 1970."""
        self._first_token = max(0.0, (time_ns - self._begun) / _NANO)


class _GenerationSpans:
    """The generator at work: writes the spans of prefill and decode when it is known how long they took."""

    def __init__(self, question: QuestionSpans, started: int) -> None:
        self._question = question
        self._started = started
        self._first_piece: int | None = None
        self._written = False

    def on_delta(self, text: str) -> None:
        """Note when the first piece came, in case that the generator never reports its own times."""
        if self._first_piece is None:
            self._first_piece = time.time_ns()
            self._question.first_token(self._first_piece)

    def on_result(self, outcome: Any) -> None:
        """Write the spans with the times of the generation."""
        if not isinstance(outcome, Generation):
            return
        ended = time.time_ns()
        timings = outcome.timings
        queue_seconds = timings.get("queue", 0.0)
        prefill_start = self._started + int(queue_seconds * _NANO)
        decode_start = prefill_start + int(timings.get("prefill", 0.0) * _NANO)
        if self._first_piece is None:
            self._question.first_token(decode_start)
        usage = outcome.usage
        tokens = {names.INPUT_TOKENS: usage.prompt_tokens, names.CACHED_TOKENS: usage.cached_tokens}
        self._question.write("prefill", prefill_start, decode_start, {**tokens, names.QUEUE_SECONDS: queue_seconds})
        decode_end = decode_start + int(timings["decode"] * _NANO) if "decode" in timings else ended
        self._question.write("decode", decode_start, decode_end, {names.OUTPUT_TOKENS: usage.completion_tokens})
        self._written = True

    def stopped(self, error: BaseException) -> None:
        """Write the spans of a generation that failed or was closed, up to now."""
        if self._written:
            return
        ended = time.time_ns()
        if self._first_piece is None:
            self._question.write("prefill", self._started, ended, error=error)
            return
        self._question.write("prefill", self._started, self._first_piece)
        self._question.write("decode", self._first_piece, ended, error=error)


def _request_attributes(question: Question, stream: bool) -> dict[str, Any]:
    attributes: dict[str, Any] = {names.STREAM: stream}
    if isinstance(question.documents, Sized):  # the pipeline takes any iterable
        attributes[names.DOCUMENTS] = len(question.documents)
    sampling = question.sampling
    if sampling is not None:
        attributes |= {
            names.MAX_TOKENS: sampling.max_tokens,
            names.TEMPERATURE: sampling.temperature,
            names.TOP_P: sampling.top_p,
            names.TOP_K: sampling.top_k,
        }
        if sampling.seed is not None and sampling.seed < 2**63:
            attributes[names.SEED] = sampling.seed
    return attributes


def _answer_attributes(answer: Answer) -> dict[str, Any]:
    usage = answer.usage
    return {
        names.FINISH_REASONS: (answer.finish_reason,),
        names.INPUT_TOKENS: usage.prompt_tokens,
        names.OUTPUT_TOKENS: usage.completion_tokens,
        names.CACHED_TOKENS: usage.cached_tokens,
        names.MITIGATION: answer.mitigation,
        names.ORDER: answer.order,
        names.CACHE: "hit" if answer.cached else "miss" if "cache" in answer.timings else "off",
        names.DOCUMENTS: len(answer.documents),
        names.DROPPED: len(answer.dropped),
    }


def _messages(question: Question) -> str:
    messages = [*question.history, {"role": "user", "content": question.text}]
    return json.dumps([_message_parts(str(m.get("role")), str(m.get("content"))) for m in messages])


def _message(role: str, text: str, finish_reason: str) -> str:
    return json.dumps([{**_message_parts(role, text), "finish_reason": finish_reason}])


def _message_parts(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


_STAGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "retriever": ("retrieve", {names.OPERATION: "retrieval", names.PROVIDER: names.PROVIDER_NAME}),
    # The conventions have no operation for reranking; custom values are allowed.
    "reranker": ("rerank", {names.OPERATION: "rerank", names.PROVIDER: names.PROVIDER_NAME}),
    "assembler": ("assemble", {}),
}


class _DocumentStage:
    def __init__(self, span: Span, content: bool) -> None:
        self._span = span
        self._content = content

    def on_delta(self, text: str) -> None:
        """Ignore it: only generators write in pieces."""

    def on_result(self, outcome: Any) -> None:
        """Record how many documents there are."""
        if not isinstance(outcome, Sequence):  # reading an iterator would empty it
            return
        self._span.set_attribute(names.DOCUMENTS, len(outcome))
        if self._content:
            scored = [{"id": d.id, "score": d.metadata.get("relevance_score")} for d in outcome]
            self._span.set_attribute(names.RETRIEVED, json.dumps(scored, default=str))


@contextmanager
def stage_span(
    tracer: Tracer, parent: Context | None, name: str, question: str, documents: Sequence[Document], *, content: bool
) -> Iterator[Stage]:
    """Return the context manager of a stage. Its span is the current one: spans that start in it are its children.

    A ``parent`` of None is the current span. ``content`` records the question and the ids of the documents.
    """
    span_name, attributes = _STAGES[name]
    span = tracer.start_span(span_name, parent, attributes=attributes)
    if documents:
        span.set_attribute(names.DOCUMENTS, len(documents))
    if content and name != "assembler":
        span.set_attribute(names.QUERY_TEXT, question)
    try:
        with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            yield _DocumentStage(span, content)
    except BaseException as error:
        fail(span, error)
        raise
    finally:
        span.end()


def fail(span: Span, error: BaseException) -> None:
    """Record the type of an error, and no more: its text may quote a prompt."""
    span.set_attribute(names.ERROR_TYPE, type(error).__name__)
    if not isinstance(error, GenerationCancelled):  # a disconnect is not an error
        span.set_status(StatusCode.ERROR)
