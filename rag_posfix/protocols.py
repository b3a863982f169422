"""The roles that a pipeline is put together from. Implementations know these; a pipeline knows nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from langchain_core.documents import Document

from rag_posfix.generation.request import (
    Chunk,
    Generation,
    GenerationRequest,
    MitigationChoice,
    MitigationInfo,
)

if TYPE_CHECKING:  # assembly implements these roles and imports this module
    from rag_posfix.assembly.assembler import Assembled
    from rag_posfix.assembly.prompt import PromptTemplate
    from rag_posfix.attention.spans import Layout
    from rag_posfix.generation.session import Session
    from rag_posfix.generation.tokenizer import Tokenizer

__all__ = [
    "AnswerCache",
    "ChatMessage",
    "Generator",
    "PassageKeeper",
    "PassageReader",
    "PromptAssembler",
    "PromptMemory",
    "Reranker",
    "Retriever",
    "Stage",
    "StageWatcher",
    "SteppedGenerator",
    "TokenEncoder",
    "WatchedGenerator",
]

ChatMessage = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``."""


@runtime_checkable
class Retriever(Protocol):
    """Finds candidates: Documents with ``id`` and ``metadata["relevance_score"]`` in [0, 1], best first."""

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents for ``question``, best first."""
        ...


@runtime_checkable
class Reranker(Protocol):
    """Scores documents for a question (a langchain ``BaseDocumentCompressor`` has this method)."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """Return copies, best first, with ``metadata["relevance_score"]`` in [0, 1]; ties keep their order."""
        ...


class TokenEncoder(Protocol):
    """What assembly needs of a generator's tokenizer (``generation.tokenizer.Tokenizer`` implements it)."""

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of ``text``; control tokens written in it become ordinary text."""
        ...

    def encode_template(self, text: str) -> list[int]:
        """Return the tokens of a piece of chat template, control tokens included. Adds none of its own."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the exact text of ``token_ids``, control tokens included."""
        ...

    def render_chat(self, messages: Sequence[ChatMessage], *, open_answer: bool = True) -> str:
        """Return the chat template filled with ``messages``; ``open_answer`` opens the assistant's turn."""
        ...


@runtime_checkable
class Generator(Protocol):
    """Answers prompts. The engine and the deterministic fake implement it."""

    @property
    def model_id(self) -> str:
        """Name of the model, for responses and cache keys."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identity of weights and dtype, for cache keys."""
        ...

    @property
    def context_window(self) -> int:
        """Most tokens that prompt and answer may have together."""
        ...

    @property
    def encoder(self) -> TokenEncoder:
        """The tokenizer that prompts must be counted and encoded with."""
        ...

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        """Check a mitigation and its parameters and return what caching needs to know of it."""
        ...

    def generate(self, request: GenerationRequest) -> Generation:
        """Return the whole answer."""
        ...

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer piece by piece; closing the iterator stops the computation within one step."""
        ...


@runtime_checkable
class SteppedGenerator(Generator, Protocol):
    """A generator whose answers can be written step by step from outside, several together. The engine is one."""

    @property
    def encoder(self) -> Tokenizer:
        """The tokenizer, which also knows what ends an answer."""
        ...

    def open(
        self, layout: Layout, mitigation: MitigationChoice | None = None, max_tokens: int = 1, salt: str = ""
    ) -> Session:
        """Read a prompt and return the session that continues it."""
        ...


@runtime_checkable
class PassageReader(Generator, Protocol):
    """A generator that tells what it makes of passages while it reads them; rerankers ask it. The engine is one."""

    def question_likelihood(self, layout: Layout, salt: str = "") -> tuple[float, ...]:
        """Return for each passage the mean log-probability of the question's tokens after that passage alone."""
        ...

    def question_attention(
        self,
        layouts: Sequence[Layout],
        salt: str = "",
        check: Callable[[], None] | None = None,
        layers: Collection[int] | None = None,
    ) -> list[tuple[tuple[float, ...], ...]]:
        """Return the attention of each prompt's suffix to each token of each passage, over heads and layers.

        The prompts differ in their suffix alone. ``check`` is called between readings; what it raises ends them.
        ``layers`` are those that count, from 0; all if None.
        """
        ...

    def passage_attention(
        self, layouts: Sequence[Layout], salt: str = "", check: Callable[[], None] | None = None
    ) -> list[tuple[float, ...]]:
        """Return for each prompt and passage the mean attention per token that the prompt's last token pays to it.

        ``check`` is called between readings; what it raises ends them.
        """
        ...


@runtime_checkable
class WatchedGenerator(Generator, Protocol):
    """A generator that works on answers before they are asked for, and looks whether they are still wanted."""

    def stream_watched(
        self, request: GenerationRequest, check: Callable[[], None], released: Callable[[], None]
    ) -> Iterator[Chunk]:
        """As ``stream``, followed from outside. Both functions run in the thread of the model: they must be quick.

        Args:
            request: What is asked.
            check: Called before each step; what it raises ends the answer there, and is raised in the stream.
            released: Called at most once, when the model has done its last work for the answer, although pieces of
                it may still wait to be read.
        """
        ...


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


class PassageKeeper(Protocol):
    """Keeps keys and values of passages for a generator. No method ever raises for a failing store."""

    def drop(self, tags: Sequence[str]) -> int:
        """Drop every entry made from passages with one of these content keys."""
        ...

    def close(self) -> None:
        """Let go of files and connections; later calls are misses."""
        ...
