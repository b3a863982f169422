"""The spans of one question: a span for the question, and one for each stage of it.

    chat MODEL
    ├── retrieve
    ├── rerank
    ├── assemble
    ├── prefill
    └── decode

A generator works in threads of its own and reports its times when the answer is complete. So the spans of prefill and
decode are written afterwards, with the times that were measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from langchain_core.documents import Document
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Tracer

from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.contracts.request import Generation
from rag_posfix.pipeline.protocols import Stage
from rag_posfix.telemetry import names
from rag_posfix.telemetry.instruments import Instruments
from rag_posfix.telemetry.stage_span import fail, stage_span

_NANO = 1_000_000_000


class QuestionSpans:
    """The trace of one question. Implements ``pipeline.protocols.QuestionTrace``.

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
            self._span.set_attributes(_asked(question, stream))
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
        self._span.set_attributes(_told(answer))
        if self._stream and self._first_token is not None:
            self._span.set_attribute(names.TIME_TO_FIRST_CHUNK, self._first_token)
        if self._content:
            self._span.set_attribute(names.OUTPUT_MESSAGES, _message("assistant", answer.text, answer.finish_reason))

    @contextmanager
    def stage(self, name: str, given: str, documents: Sequence[Document] = ()) -> Iterator[Stage]:
        """Return the context manager of a stage.

        Args:
            name: ``retriever``, ``reranker``, ``assembler`` or ``generator``.
        """
        if name == "generator":
            generation = _GenerationSpans(self, time.time_ns())
            try:
                yield generation
            except BaseException as error:
                generation.stopped(error)
                raise
            return
        with stage_span(self._tracer, self._context, name, given, documents, content=self._content) as stage:
            yield stage

    def write(
        self,
        name: str,
        start: int,
        end: int,
        attributes: Mapping[str, int | float] | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Write a span that is over.

        Args:
            name: ``prefill`` or ``decode``.
            start: When it began, in nanoseconds since 1970.
        """
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=start)
        if isinstance(error, GeneratorExit):
            span.set_attribute(names.CLOSED_EARLY, True)
        elif error is not None:
            fail(span, error)
        span.end(max(start, end))

    def first_token(self, at: int) -> None:
        """Note when the first token came, in nanoseconds since 1970."""
        self._first_token = max(0.0, (at - self._begun) / _NANO)


class _GenerationSpans:
    """The generator at work: writes the spans of prefill and decode when it is known how long they took."""

    def __init__(self, question: QuestionSpans, started: int) -> None:
        self._question = question
        self._started = started
        self._first_piece: int | None = None
        self._written = False

    def piece(self, text: str) -> None:
        """Note when the first piece came, in case that the generator never reports its own times."""
        if self._first_piece is None:
            self._first_piece = time.time_ns()
            self._question.first_token(self._first_piece)

    def done(self, outcome: Any) -> None:
        """Write the spans with the times of the generation."""
        if not isinstance(outcome, Generation):
            return
        ended = time.time_ns()
        timings = outcome.timings
        waited = timings.get("queue", 0.0)
        read_from = self._started + int(waited * _NANO)
        read_until = read_from + int(timings.get("prefill", 0.0) * _NANO)
        if self._first_piece is None:
            self._question.first_token(read_until)
        usage = outcome.usage
        tokens = {names.INPUT_TOKENS: usage.prompt_tokens, names.CACHED_TOKENS: usage.cached_tokens}
        self._question.write("prefill", read_from, read_until, {**tokens, names.QUEUE_SECONDS: waited})
        wrote_until = read_until + int(timings["decode"] * _NANO) if "decode" in timings else ended
        self._question.write("decode", read_until, wrote_until, {names.OUTPUT_TOKENS: usage.completion_tokens})
        self._written = True

    def stopped(self, error: BaseException) -> None:
        """Write the spans of a generation that failed or was closed, up to now."""
        if self._written:
            return
        now = time.time_ns()
        if self._first_piece is None:
            self._question.write("prefill", self._started, now, error=error)
            return
        self._question.write("prefill", self._started, self._first_piece)
        self._question.write("decode", self._first_piece, now, error=error)


def _asked(question: Question, stream: bool) -> dict[str, Any]:
    found: dict[str, Any] = {names.STREAM: stream}
    if isinstance(question.documents, Sized):  # the pipeline takes any iterable
        found[names.DOCUMENTS] = len(question.documents)
    sampling = question.sampling
    if sampling is not None:
        found |= {
            names.MAX_TOKENS: sampling.max_tokens,
            names.TEMPERATURE: sampling.temperature,
            names.TOP_P: sampling.top_p,
            names.TOP_K: sampling.top_k,
        }
        if sampling.seed is not None and sampling.seed < 2**63:
            found[names.SEED] = sampling.seed
    return found


def _told(answer: Answer) -> dict[str, Any]:
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
    said = [*question.history, {"role": "user", "content": question.text}]
    return json.dumps([_parts(str(m.get("role")), str(m.get("content"))) for m in said])


def _message(role: str, text: str, finish_reason: str) -> str:
    return json.dumps([{**_parts(role, text), "finish_reason": finish_reason}])


def _parts(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}
