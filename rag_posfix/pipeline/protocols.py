"""Protocols of the parts of a pipeline besides its generator: assembler, caches, prompt memory, watchers, tracer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembled
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.plan.layout import Layout


class PromptAssembler(Protocol):
    """Makes prompts from questions and documents."""

    @property
    def template(self) -> PromptTemplate:
        """The prompt template."""
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
    """Stores the passages of recent prompts, so that an order can start with the same passages."""

    def recent(self, scope: str) -> Sequence[Sequence[str]]:
        """Return the content keys of the passages of a scope's recent prompts, the newest first."""
        ...

    def add(self, scope: str, keys: Sequence[str]) -> None:
        """Store the passages of a prompt, in prompt order."""
        ...

    def drop(self, keys: Sequence[str]) -> None:
        """Drop every prompt with one of these passages."""
        ...


class Stage(Protocol):
    """A running stage of one question."""

    def piece(self, text: str) -> None:
        """Receive a piece of an answer while it is generated."""
        ...

    def done(self, outcome: Any) -> None:
        """Receive the result of the stage: documents, or a ``Generation``."""
        ...


class StageWatcher(Protocol):
    """Is notified of the stages of one question, for traces."""

    def stage(self, name: str, given: str, documents: Sequence[Document] = ()) -> AbstractContextManager[Stage]:
        """Return the context manager of a stage; an exception that it sees is the failure of the stage.

        Args:
            name: ``retriever``, ``reranker`` or ``generator``; for a ``QuestionTrace`` also ``assembler``.
        """
        ...


class QuestionTrace(StageWatcher, Protocol):
    """The trace of one question."""

    def answered(self, answer: Answer) -> None:
        """Receive the complete answer."""
        ...


class QuestionTracer(StageWatcher, Protocol):
    """Traces every question of a pipeline. Its methods and those of its traces do not raise.

    ``stage`` is for stages outside of a question, such as a rerank request.
    """

    def question(self, question: Question, model: str, *, stream: bool) -> AbstractContextManager[QuestionTrace]:
        """Return the context manager of a question; an exception that it sees is the failure of the question.

        For a stream it is entered in one call and left in another, which may run in another thread.
        """
        ...


class AnswerCache(Protocol):
    """The answer cache. Methods do not raise if a tier fails: a failure is counted and is a miss."""

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return the stored answer (JSON types only), or None."""
        ...

    def put(self, key: str, value: Mapping[str, Any], document_ids: Sequence[str] = ()) -> None:
        """Store an answer; ``document_ids`` are the documents it was made from."""
        ...

    def single_flight(self, key: str) -> AbstractContextManager[bool | None]:
        """Hold while computing ``key``, after a look-up found nothing; equal concurrent keys wait.

        The value says whether another call may have stored the answer since that look-up.
        """
        ...

    def drop_documents(self, document_ids: Sequence[str]) -> int:
        """Drop every answer made from one of these documents."""
        ...

    def close(self) -> None:
        """Close files and connections; later lookups are misses."""
        ...


class DroppablePassages(Protocol):
    """The passage KV store, as the pipeline uses it to drop entries. Methods do not raise if a tier fails."""

    def drop(self, tags: Sequence[str]) -> int:
        """Drop every entry made from passages with one of these content keys."""
        ...

    def close(self) -> None:
        """Close files and connections; later lookups are misses."""
        ...


class WritablePassages(Protocol):
    """The passage KV store, as ``precompute`` uses it to check what was written."""

    @property
    def queue_bytes(self) -> int:
        """Size limit of the write queue in bytes; entries beyond it are lost."""
        ...

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until the write queue is empty; return False after a timeout."""
        ...

    def lasting_stats(self) -> Sequence[dict[str, Any]]:
        """Return name, entries, bytes and errors of each tier on disk or in Redis; of all tiers if there is none."""
        ...


@runtime_checkable
class PassagePrecomputer(Protocol):
    """A generator that computes keys and values of passages into its passage KV store before any question."""

    @property
    def encoder(self) -> TokenEncoder:
        """The tokenizer."""
        ...

    @property
    def context_window(self) -> int:
        """Token limit of prompt and answer together."""
        ...

    @property
    def passages(self) -> WritablePassages | None:
        """The passage KV store, or None."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, in all layers."""
        ...

    def precompute(self, layout: Layout, mitigation: MitigationChoice, salt: str = "") -> int:
        """Compute prefix and passages of a prompt into the store; return the number of computed tokens."""
        ...
