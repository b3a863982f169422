"""The protocols of what a pipeline uses besides its generator: assembler, caches, prompt memory, stage watcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembled
from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.contracts.generator import ChatMessage, TokenEncoder
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.plan.layout import Layout

__all__ = [
    "AnswerCache",
    "DroppablePassages",
    "PassagePrecomputer",
    "PromptAssembler",
    "PromptMemory",
    "Stage",
    "StageWatcher",
    "WritablePassages",
]


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


class WritablePassages(Protocol):
    """The passage KV store as precomputing uses it: to learn what was written."""

    @property
    def queue_bytes(self) -> int:
        """Bytes that may wait to be written; what exceeds them is lost."""
        ...

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until everything is written; return False if that takes longer."""
        ...

    def lasting_stats(self) -> Sequence[dict[str, Any]]:
        """Return name, entries, bytes and errors of each tier that outlives the process; of all without such."""
        ...


class PassagePrecomputer(Protocol):
    """A generator that reads passages into its passage KV store before any question is asked."""

    @property
    def encoder(self) -> TokenEncoder:
        """The tokenizer."""
        ...

    @property
    def context_window(self) -> int:
        """Most tokens that prompt and answer may have together."""
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
        """Read prefix and passages of a prompt into the store; return how many tokens had to be read."""
        ...
