"""The protocols of what a pipeline uses besides its generator: assembler, caches, prompt memory, stage watcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembled
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.contracts.generator import ChatMessage

__all__ = ["AnswerCache", "DroppablePassages", "PromptAssembler", "PromptMemory", "Stage", "StageWatcher"]


class PromptAssembler(Protocol):
    """Makes prompts from questions and documents."""

    @property
    def template(self) -> PromptTemplate:
        """The words of the prompt."""
        ...

    def assemble(
        self,
        question: str,
        documents: Sequence[Document] = (),
        *,
        order: str = "relevance",
        seed: int = 0,
        max_new_tokens: int = 128,
        budget_tokens: int | None = None,
        history: Sequence[ChatMessage] = (),
        recent: Sequence[Sequence[str]] = (),
        order_free: bool = False,
    ) -> Assembled:
        """Return the prompt that asks ``question`` about ``documents``."""
        ...


class PromptMemory(Protocol):
    """Remembers the passages of recent prompts, so that an order may begin as one of them began."""

    def recent(self, scope: str) -> Sequence[Sequence[str]]:
        """Return the content keys of the passages of a scope's recent prompts, the newest first."""
        ...

    def add(self, scope: str, keys: Sequence[str]) -> None:
        """Remember a prompt's passages, in their order."""
        ...

    def forget(self, keys: Sequence[str]) -> None:
        """Forget every prompt with one of these passages."""
        ...


class Stage(Protocol):
    """A stage of one question while it runs."""

    def piece(self, text: str) -> None:
        """Tell a piece of an answer that is being written."""
        ...

    def done(self, outcome: Any) -> None:
        """Tell what came out: documents, or a ``Generation``."""
        ...


class StageWatcher(Protocol):
    """Is told what a pipeline does for one question: for traces."""

    def stage(self, name: str, given: str, documents: Sequence[Document] = ()) -> AbstractContextManager[Stage]:
        """Return what holds while a stage runs; an exception that passes through it is the stage's failure.

        Args:
            name: ``retriever``, ``reranker`` or ``generator``.
            given: The question.
            documents: What a reranker scores.
        """
        ...


class AnswerCache(Protocol):
    """Keeps finished answers. No method ever raises for a failing store: a failure is a miss, and counted."""

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return the stored answer (JSON types only), or None."""
        ...

    def put(self, key: str, value: Mapping[str, Any], document_ids: Sequence[str] = ()) -> None:
        """Store an answer; ``document_ids`` are the documents it was made from."""
        ...

    def single_flight(self, key: str) -> AbstractContextManager[None]:
        """Hold while computing ``key``: equal keys wait, then find the answer in the cache."""
        ...

    def drop_documents(self, document_ids: Sequence[str]) -> int:
        """Drop every answer made from one of these documents."""
        ...

    def close(self) -> None:
        """Let go of files and connections; later calls are misses."""
        ...


class DroppablePassages(Protocol):
    """The passage KV store as a pipeline uses it: to drop entries. No method raises because the store fails."""

    def drop(self, tags: Sequence[str]) -> int:
        """Drop every entry made from passages with one of these content keys."""
        ...

    def close(self) -> None:
        """Let go of files and connections; later calls are misses."""
        ...
