"""The span of a stage whose result is documents: retrieve, rerank, assemble."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core.documents import Document
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode, Tracer

from rag_posfix.errors import GenerationCancelled
from rag_posfix.pipeline.protocols import Stage
from rag_posfix.telemetry import names

_STAGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "retriever": ("retrieve", {names.OPERATION: "retrieval", names.PROVIDER: names.PROVIDER_NAME}),
    # The conventions have no operation for reranking; a value of one's own is allowed.
    "reranker": ("rerank", {names.OPERATION: "rerank", names.PROVIDER: names.PROVIDER_NAME}),
    "assembler": ("assemble", {}),
}


class _DocumentStage:
    def __init__(self, span: Span, content: bool) -> None:
        self._span = span
        self._content = content

    def piece(self, text: str) -> None:
        """Ignore it: only generators write in pieces."""

    def done(self, outcome: Any) -> None:
        """Record how many documents there are."""
        if not isinstance(outcome, Sequence):  # reading an iterator would empty it
            return
        self._span.set_attribute(names.DOCUMENTS, len(outcome))
        if self._content:
            scored = [{"id": d.id, "score": d.metadata.get("relevance_score")} for d in outcome]
            self._span.set_attribute(names.RETRIEVED, json.dumps(scored, default=str))


@contextmanager
def stage_span(
    tracer: Tracer, parent: Context | None, name: str, given: str, documents: Sequence[Document], *, content: bool
) -> Iterator[Stage]:
    """Return the context manager of a stage. Its span is the current one: calls of others become its children.

    Args:
        parent: The context of the parent span; None is the current one.
        name: ``retriever``, ``reranker`` or ``assembler``.
        content: Whether the question and the ids of the documents are recorded.
    """
    span_name, attributes = _STAGES[name]
    span = tracer.start_span(span_name, parent, attributes=attributes)
    if documents:
        span.set_attribute(names.DOCUMENTS, len(documents))
    if content and name != "assembler":
        span.set_attribute(names.QUERY_TEXT, given)
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
    if not isinstance(error, GenerationCancelled):  # the client left: nothing is wrong here
        span.set_status(StatusCode.ERROR)
