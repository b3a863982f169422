"""One question on its way through the stages of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from langchain_core.documents import Document

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.request import GenerationRequest, MitigationInfo, Usage
from rag_posfix.contracts.retrieval import SearchQuery
from rag_posfix.pipeline.prompt_memory import RememberedPrompt
from rag_posfix.pipeline.tracing import QuestionTrace, Stage, StageWatcher


@dataclass(frozen=True, slots=True)
class QuestionRun:
    """One question on its way through the stages; ``timings`` are seconds by stage.

    ``left_out`` are ids of retrieved passages below the floor, with the reason ``floor``.

    ``filter`` is that of the question and of the defaults together, ``query`` what retriever and reranker get.
    """

    question: Question
    salt: str
    filter: Mapping[str, Any] | None
    query: SearchQuery
    trace: QuestionTrace
    watcher: StageWatcher
    timings: dict[str, float] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - started

    def leave_out(self, documents: Sequence[Document], kept: Sequence[Document]) -> None:
        """Note the documents that are not among ``kept``."""
        remaining = {id(document) for document in kept}
        self.left_out.extend((str(each.id), "floor") for each in documents if id(each) not in remaining)

    @contextmanager
    def stage(self, timing: str, name: str, documents: Sequence[Document] = ()) -> Iterator[Stage]:
        watcher, text = (self.trace, self.question.text) if name == "assembler" else (self.watcher, self.query.text)
        with self.timed(timing), watcher.stage(name, text, documents) as stage:
            yield stage


@dataclass(frozen=True, slots=True)
class PreparedQuestion:
    """A question before the generator runs.

    ``spent`` are the tokens that a server read and wrote about passages.
    """

    run: QuestionRun
    prompt: RememberedPrompt
    request: GenerationRequest
    info: MitigationInfo
    warnings: tuple[str, ...]
    spent: Usage
