"""Notification of the stages of a question, for the tracer of the pipeline and a watcher of the caller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from langchain_core.documents import Document

from rag_posfix.checked import check_type
from rag_posfix.contracts.answer import Answer, Question


class Stage(Protocol):
    """A running stage of one question."""

    def on_delta(self, text: str) -> None:
        """Receive a piece of an answer while it is generated."""
        ...

    def on_result(self, outcome: Any) -> None:
        """Receive the result of the stage: documents, or a ``Generation``."""
        ...


@runtime_checkable
class StageWatcher(Protocol):
    """Is notified of the stages of one question, for traces."""

    def stage(self, name: str, question: str, documents: Sequence[Document] = ()) -> AbstractContextManager[Stage]:
        """Return the context manager of a stage; an exception that it sees is the failure of the stage.

        Args:
            name: ``retriever``, ``reranker`` or ``generator``; for a ``QuestionTrace`` also ``assembler``.
            question: The text of the question.
        """
        ...


class QuestionTrace(StageWatcher, Protocol):
    """The trace of one question."""

    def answered(self, answer: Answer) -> None:
        """Receive the complete answer."""
        ...


class QuestionTracer(StageWatcher, Protocol):
    """Traces every question of a pipeline. As a watcher it traces stages outside of a question, such as a rerank."""

    def question(self, question: Question, model: str, *, stream: bool) -> AbstractContextManager[QuestionTrace]:
        """Return the context manager of a question; an exception that it sees is the failure of the question.

        For a stream it is entered in one call and left in another, which may run in another thread.
        """
        ...


class NoopTracer:
    """A tracer that traces nothing. It is its own trace, stage and context manager, so it costs a few calls."""

    def question(self, question: Question, model: str, *, stream: bool) -> NoopTracer:
        """Return this object."""
        return self

    def stage(self, name: str, question: str, documents: Sequence[Document] = ()) -> NoopTracer:
        """Return this object."""
        return self

    def __enter__(self) -> NoopTracer:
        """Return this object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do nothing."""

    def answered(self, answer: Answer) -> None:
        """Ignore it."""

    def on_delta(self, text: str) -> None:
        """Ignore it."""

    def on_result(self, outcome: Any) -> None:
        """Ignore it."""


NOOP_TRACER = NoopTracer()
"""The tracer of pipelines that are not traced."""


def combine_watchers(trace: QuestionTrace, watcher: StageWatcher | None) -> StageWatcher:
    """Return a watcher that passes each stage on to the trace and to the watcher of the caller, if there is one."""
    if watcher is None:
        return trace
    check_type("watcher", watcher, StageWatcher, "a StageWatcher, or None")
    return watcher if trace is NOOP_TRACER else _Watchers(trace, watcher)


class _Watchers:
    def __init__(self, *watchers: StageWatcher) -> None:
        self._watchers = watchers

    @contextmanager
    def stage(self, name: str, question: str, documents: Sequence[Document] = ()) -> Iterator[Stage]:
        with ExitStack() as stack:
            yield _Stages(
                [stack.enter_context(watcher.stage(name, question, documents)) for watcher in self._watchers]
            )


class _Stages:
    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def on_delta(self, text: str) -> None:
        for stage in self._stages:
            stage.on_delta(text)

    def on_result(self, outcome: Any) -> None:
        for stage in self._stages:
            stage.on_result(outcome)
