"""Who watches the stages of a question: nobody, the tracer of the pipeline, and a watcher of the caller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from langchain_core.documents import Document

from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.pipeline.protocols import QuestionTrace, Stage, StageWatcher


class Untraced:
    """A tracer that traces nothing. It is its own trace, stage and context manager, so it costs a few calls."""

    def question(self, question: Question, model: str, *, stream: bool) -> Untraced:
        """Return this object."""
        return self

    def stage(self, name: str, given: str, documents: Sequence[Document] = ()) -> Untraced:
        """Return this object."""
        return self

    def __enter__(self) -> Untraced:
        """Return this object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do nothing."""

    def answered(self, answer: Answer) -> None:
        """Ignore it."""

    def piece(self, text: str) -> None:
        """Ignore it."""

    def done(self, outcome: Any) -> None:
        """Ignore it."""


UNTRACED = Untraced()
"""The tracer of pipelines that are not traced."""


def watched_by(trace: QuestionTrace, watcher: StageWatcher | None) -> StageWatcher:
    """Return a watcher that passes each stage on to the trace and to the watcher of the caller.

    Args:
        watcher: The watcher of the caller, or None.
    """
    if watcher is None:
        return trace
    return watcher if trace is UNTRACED else _Both(trace, watcher)


class _Both:
    def __init__(self, trace: QuestionTrace, watcher: StageWatcher) -> None:
        self._trace = trace
        self._watcher = watcher

    @contextmanager
    def stage(self, name: str, given: str, documents: Sequence[Document] = ()) -> Iterator[Stage]:
        with self._trace.stage(name, given, documents) as traced, self._watcher.stage(name, given, documents) as seen:
            yield _BothStages(traced, seen)


class _BothStages:
    def __init__(self, *stages: Stage) -> None:
        self._stages = stages

    def piece(self, text: str) -> None:
        for stage in self._stages:
            stage.piece(text)

    def done(self, outcome: Any) -> None:
        for stage in self._stages:
            stage.done(outcome)
