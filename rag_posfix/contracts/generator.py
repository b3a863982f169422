"""Protocols of tokenizer and generator, and the display names of models. No concrete class is used.

What is collected while a question is answered, such as tokens that are spent apart from its answer.

langchain's interface of a reranker returns documents alone: anything else is in a ``ContextVar``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePath
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest, MitigationChoice, MitigationInfo, Usage
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.plan.layout import Layout, Span

ChatMessage = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``.

For models with tools an answer may have ``tool_calls``, the JSON text of OpenAI's field of this name, and the role
``tool`` has the result of the call ``tool_call_id`` of the tool ``name``.
"""


class TokenEncoder(Protocol):
    """The methods of a tokenizer that assembly needs (``generation.model.tokenizer.Tokenizer`` implements them).

    A subclass inherits ``encode_parts``, which encodes each part alone.
    """

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of ``text``; control tokens written in it become ordinary text."""
        ...

    def encode_template(self, text: str) -> list[int]:
        """Return the tokens of a part of the chat template, including its control tokens. No token is added."""
        ...

    def encode_parts(self, parts: Sequence[str]) -> tuple[list[int], list[Span]]:
        """Return the tokens of the joined text, and for each part the span of the tokens that hold its characters.

        Parts of the chat template alternate with contents, in which control tokens become ordinary text; the first
        and the last part are of the template, and may be empty.
        """
        ids: list[int] = []
        spans: list[Span] = []
        for index, part in enumerate(parts):
            start = len(ids)
            ids += self.encode_text(part) if index % 2 else self.encode_template(part)
            spans.append(Span(start, len(ids)))
        return ids, spans

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the exact text of ``token_ids``, control tokens included."""
        ...

    def render_chat(self, messages: Sequence[ChatMessage], *, open_answer: bool = True) -> str:
        """Return the chat template filled with ``messages``; ``open_answer`` starts the assistant's turn."""
        ...


@runtime_checkable
class PromptEncoder(TokenEncoder, Protocol):
    """A tokenizer that also encodes prompts that a client wrote in full, for completions without a chat template."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids are below it."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a whole prompt: control tokens are recognised, and the tokenizer adds its own."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; they need not be complete characters."""
        ...


@runtime_checkable
class ToolEncoder(TokenEncoder, Protocol):
    """A tokenizer whose chat template may write tools, calls of tools and their results."""

    @property
    def has_tools(self) -> bool:
        """Whether messages may be calls of tools and their results: ``with_tools`` returned this tokenizer."""
        ...

    def with_tools(self, tools: Sequence[Mapping[str, Any]], opening: str = "") -> ToolEncoder:
        """Return a tokenizer that renders ``tools``, in OpenAI's form, and begins the answer with ``opening``."""
        ...

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated tokens without special tokens."""
        ...


def takes_tool_messages(encoder: TokenEncoder) -> bool:
    """Return whether a tokenizer renders calls of tools and their results."""
    return isinstance(encoder, ToolEncoder) and encoder.has_tools


@runtime_checkable
class Generator(Protocol):
    """Generates answers to prompts. The engine and the deterministic fake implement it."""

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
        """Token limit of prompt and answer together."""
        ...

    @property
    def encoder(self) -> TokenEncoder:
        """The tokenizer of the model."""
        ...

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        """Check a mitigation and its parameters, and return its name, fingerprint and order invariance."""
        ...

    def generate(self, request: GenerationRequest) -> Generation:
        """Return the whole answer."""
        ...

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces; closing the iterator stops the computation within one step."""
        ...


@runtime_checkable
class LikelihoodReader(Generator, Protocol):
    """A generator that returns the likelihood of a question after a passage, for rerankers."""

    def question_likelihood(self, layout: Layout, salt: str = "", *, bare: bool = False) -> tuple[float, ...]:
        """Return for each passage the mean log-probability of the question's tokens after that passage alone.

        With ``bare`` the last value is that of the question without a passage.
        """
        ...


@runtime_checkable
class OddsReader(Generator, Protocol):
    """A generator without a known vocabulary that compares two answers by their spellings. Servers are read so."""

    def log_odds(
        self,
        layout: Layout,
        yes: Sequence[str],
        no: Sequence[str],
        salt: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> tuple[float, ...]:
        """Return log p(yes) - log p(no) as the beginning of the answer after each passage alone, and without any.

        ``check`` is called while the answers are awaited; an exception of ``check`` ends the judgement.
        """
        ...


@runtime_checkable
class FirstTokenReader(Generator, Protocol):
    """A generator that returns how likely tokens begin the answer after a single passage, for rerankers."""

    def first_token_log_probs(self, layout: Layout, tokens: Sequence[int], salt: str = "") -> list[tuple[float, ...]]:
        """Return the log-probability of each token as the first of the answer, (N + 1, len(tokens)).

        Row k has passage k alone, the last row has no passage.
        """
        ...


@runtime_checkable
class StateReader(Generator, Protocol):
    """A generator that returns projected hidden states of tokens, for rerankers that are trained so."""

    def projected_states(self, token_ids: Sequence[int], marked: Sequence[int]) -> list[tuple[float, ...]]:
        """Return the state of each marked token of a prompt after the projector, (len(marked), P); indices from 0."""
        ...


@runtime_checkable
class PassageReader(LikelihoodReader, FirstTokenReader, Protocol):
    """A generator that returns attention and likelihoods of passages, for rerankers. The engine implements it."""

    def question_attention(
        self,
        layouts: Sequence[Layout],
        salt: str = "",
        check: Callable[[], None] | None = None,
        layers: Collection[int] | None = None,
        heads: Collection[tuple[int, int]] | None = None,
    ) -> list[tuple[tuple[float, ...], ...]]:
        """Return the attention of each prompt's suffix to each token of each passage, summed over heads and layers.

        The prompts differ only in their suffix. ``check`` is called between forward passes; an exception of ``check``
        ends the computation. ``layers`` are the layers that are used, from 0; ``heads`` are the query heads that are
        used instead, as (layer, head); all if None.
        """
        ...

    def passage_attention(
        self, layouts: Sequence[Layout], salt: str = "", check: Callable[[], None] | None = None
    ) -> list[tuple[float, ...]]:
        """Return for each prompt and passage the mean attention per token from the prompt's last token.

        ``check`` is called between forward passes; an exception of ``check`` ends the computation.
        """
        ...


@runtime_checkable
class ScoringGenerator(Generator, Protocol):
    """A generator that says whether it returns log-probabilities. Others return none."""

    @property
    def scores_tokens(self) -> bool:
        """Whether ``Sampling.top_logprobs`` and ``GenerationRequest.prompt_scored`` are supported."""
        ...


def gives_scores(generator: Generator) -> bool:
    """Return whether a generator returns log-probabilities."""
    return isinstance(generator, ScoringGenerator) and generator.scores_tokens


@runtime_checkable
class StructuredGenerator(Generator, Protocol):
    """A generator whose answers can follow a JSON schema, ``Sampling.json_schema``."""

    def check_json_schema(self, schema: str) -> None:
        """Raise if no answer can follow the schema: ConfigError or UnsupportedModelError. Runs no model."""
        ...


def check_json_schema(generator: Generator, schema: str) -> None:
    """Raise unless the answers of a generator can follow a JSON schema."""
    if not isinstance(generator, StructuredGenerator):
        raise UnsupportedModelError(f"{shown_model(generator.model_id)} writes no JSON by a schema; ask without one")
    generator.check_json_schema(schema)


@runtime_checkable
class CachingGenerator(Generator, Protocol):
    """A generator with a passage KV store that says which segments of a prompt are stored."""

    def cached_segments(self, request: GenerationRequest) -> tuple[bool, ...]:
        """Return whether the prefix, and each passage, is stored. Runs no model."""
        ...


@runtime_checkable
class WatchedGenerator(Generator, Protocol):
    """A generator that computes ahead of its readers, and checks at each step whether the answer is still needed."""

    def stream_watched(
        self, request: GenerationRequest, check: Callable[[], None], released: Callable[[], None]
    ) -> Iterator[Chunk]:
        """Do what ``stream`` does, with two callbacks that run in the thread of the model and must be quick.

        Args:
            check: Called before each step; an exception of ``check`` ends the answer and is raised in the stream.
            released: Called at most once, when the model has finished the answer, even if pieces wait to be read.
        """
        ...


def shown_model(model_id: str) -> str:
    """Return a name of a model without the folders of this machine; an id of the form owner/name stays."""
    path = PurePath(model_id)
    if model_id.startswith((".", "~")) or path.is_absolute() or ("/" in model_id and _exists(model_id)):
        return Path(model_id).expanduser().resolve().name or "model"
    return model_id


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


T = TypeVar("T")


class Collected(Generic[T]):
    """The values of one kind that are collected for the current question."""

    def __init__(self, name: str) -> None:
        self._values: ContextVar[list[T] | None] = ContextVar(name, default=None)

    @contextmanager
    def during(self) -> Iterator[list[T]]:
        """Yield the list to which ``add`` adds during the block."""
        values: list[T] = []
        token = self._values.set(values)
        try:
            yield values
        finally:
            self._values.reset(token)

    def add(self, value: T) -> None:
        """Add a value to those of the current question; no-op outside of a question."""
        values = self._values.get()
        if values is not None:
            values.append(value)


_SPENT = Collected[Usage]("rag_posfix_spent_usage")
collected_usage, spend = _SPENT.during, _SPENT.add


def sum_usage(usages: Sequence[Usage]) -> Usage:
    """Return the sum of each count."""
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
