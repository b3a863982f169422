"""The protocols of what answers prompts: tokenizer and generator. They name no concrete class and no documents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest, MitigationChoice, MitigationInfo
from rag_posfix.plan.layout import Layout

__all__ = [
    "ChatMessage",
    "Generator",
    "PassageReader",
    "TokenEncoder",
    "WatchedGenerator",
]

ChatMessage = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``."""


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
    """A generator that works on answers before they are asked for, and looks whether they are still request."""

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
