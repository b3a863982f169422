"""Base classes of tokenizers and generators, and the display names of models.

What is collected while a question is answered, such as tokens that are spent apart from its answer.

langchain's interface of a reranker returns documents alone: anything else is in a ``ContextVar``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePath
from typing import Any, Generic, Literal, Protocol, TypeVar

from rag_posfix.contracts.request import (
    Chunk,
    Generation,
    GenerationRequest,
    MitigationChoice,
    MitigationInfo,
    Usage,
    collect_stream,
)
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.plan.layout import Layout, Span

ChatMessage = Mapping[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``.

For models with tools an answer may have ``tool_calls``, the JSON text of OpenAI's field of this name, and the role
``tool`` has the result of the call ``tool_call_id`` of the tool ``name``.
"""


class TokenEncoder(ABC):
    """Encodes and decodes the text of a model. ``generation.model.tokenizer.Tokenizer`` implements all methods.

    A subclass inherits ``encode_parts``, which encodes each part alone. Where ``vocab_size`` is 0 the encoder takes
    no prompt that a client wrote in full, and where ``takes_tools`` is false no tools: their methods refuse.
    """

    takes_tools = False
    """Whether the chat template may write tools, calls of tools and their results."""

    @property
    def has_tools(self) -> bool:
        """Whether messages may be calls of tools and their results: ``with_tools`` returned this tokenizer."""
        return False

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids are below it. 0 if there is no vocabulary."""
        return 0

    @abstractmethod
    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of ``text``; control tokens written in it become ordinary text."""

    @abstractmethod
    def encode_template(self, text: str) -> list[int]:
        """Return the tokens of a part of the chat template, including its control tokens. No token is added."""

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

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the exact text of ``token_ids``, control tokens included."""

    @abstractmethod
    def render_chat(self, messages: Sequence[ChatMessage], *, open_answer: bool = True) -> str:
        """Return the chat template filled with ``messages``; ``open_answer`` starts the assistant's turn."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a whole prompt: control tokens are recognised, and the tokenizer adds its own."""
        raise self._refusal("prompts without a chat template")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; they need not be complete characters."""
        raise self._refusal("prompts without a chat template")

    def with_tools(self, tools: Sequence[Mapping[str, Any]], opening: str = "") -> TokenEncoder:
        """Return a tokenizer that renders ``tools``, in OpenAI's form, and begins the answer with ``opening``."""
        raise self._refusal("tools")

    def decode_answer(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated tokens without special tokens."""
        raise self._refusal("tools")

    def _refusal(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{type(self).__name__} takes no {what}; use a model that this process loads")


class PassageKVStore(Protocol):
    """The passage KV store, to drop entries and to check what was written. Methods do not raise if a tier fails.

    The methods of ``caching.kv.store.PassageStore`` that need no torch.
    """

    @property
    def queue_bytes(self) -> int:
        """Size limit of the write queue in bytes; entries beyond it are lost."""
        ...

    def begin(self) -> AbstractContextManager[object]:
        """Open a computation: what is deleted from now on is not stored as long as something refers to the object."""
        ...

    def flush(self, timeout_seconds: float = 30.0) -> bool:
        """Wait until the write queue is empty; return False after a timeout."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return the counts of the store and of its tiers."""
        ...

    def persistent_stats(self) -> Sequence[dict[str, Any]]:
        """Return name, entries, bytes and errors of each tier on disk or in Redis; of all tiers if there is none."""
        ...

    def memory_tags(self) -> frozenset[str]:
        """Return the tags of the entries in memory."""
        ...

    def drop(self, tags: Sequence[str]) -> int:
        """Drop every entry made from passages with one of these content keys."""
        ...

    def close(self) -> None:
        """Close files and connections; later lookups are misses."""
        ...


GeneratorCapability = Literal[
    "log_probs", "likelihood", "first_token", "odds", "attention", "states", "steps", "precompute"
]
"""What some generators can do.

``log_probs``: return log-probabilities (``Sampling.top_logprobs``, ``GenerationRequest.prompt_scored``).
``steps``: share decode steps with other answers, with the methods of ``Engine`` (``BatchingGenerator``).
``precompute``: compute keys and values of passages before any question.
For rerankers: ``likelihood`` (``question_likelihood``), ``first_token`` (``first_token_log_probs``), ``odds``
(``log_odds``), ``states`` (``projected_states``), ``attention`` (``question_attention`` and ``passage_attention``).
"""


class Generator(ABC):
    """Generates answers to prompts. A subclass sets the attributes and implements ``describe`` and ``stream``.

    ``generate`` collects the stream. The other methods are for some generators alone: here they refuse, or return
    what holds of every generator.

    Attributes:
        model_id: Name of the model, for responses and cache keys.
        fingerprint: Identity of weights and dtype, for cache keys.
        context_window: Token limit of prompt and answer together.
        encoder: The tokenizer of the model.
        capabilities: What it can do beyond answers.
        passages: The passage KV store, or None.
        failure: Why no request can be answered any more; None while all is well.
    """

    model_id: str
    fingerprint: str
    context_window: int
    encoder: TokenEncoder
    capabilities: Set[GeneratorCapability] = frozenset()
    passages: PassageKVStore | None = None
    failure: str | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, in all layers; 0 if unknown."""
        return 0

    @abstractmethod
    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        """Check a mitigation and its parameters, and return its name, fingerprint and order invariance."""

    @abstractmethod
    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces, the last chunk carries the whole; closing the iterator stops within one step."""

    def generate(self, request: GenerationRequest) -> Generation:
        """Return the whole answer. Errors as those of ``stream``."""
        return collect_stream(self.stream(request))

    def stream_watched(
        self, request: GenerationRequest, check: Callable[[], None], released: Callable[[], None]
    ) -> Iterator[Chunk]:
        """Do what ``stream`` does; a generator that computes ahead of its readers calls both in the model's thread.

        Args:
            check: Called before each step; an exception of ``check`` ends the answer and is raised in the stream.
            released: Called at most once, when the model has finished the answer, even if pieces wait to be read.
        """
        return self.stream(request)

    def check_json_schema(self, schema: str) -> None:
        """Raise if no answer can follow the schema: ConfigError or UnsupportedModelError. Runs no model."""
        raise UnsupportedModelError(f"{display_name(self.model_id)} writes no JSON by a schema; ask without one")

    def cached_segments(self, request: GenerationRequest) -> tuple[bool, ...]:
        """Return whether the passage KV store has the prefix, and each passage; () without a store. Runs no model."""
        return ()

    def precompute(self, layout: Layout, mitigation: MitigationChoice, salt: str = "") -> int:
        """Compute prefix and passages of a prompt into the store; return the number of computed tokens."""
        raise UnsupportedModelError(f"{type(self).__name__} computes no passages before questions; give an engine")

    def question_likelihood(self, layout: Layout, salt: str = "", *, bare: bool = False) -> tuple[float, ...]:
        """Return for each passage the mean log-probability of the question's tokens after that passage alone.

        With ``bare`` the last value is that of the question without a passage.
        """
        raise self._no_reading()

    def first_token_log_probs(self, layout: Layout, tokens: Sequence[int], salt: str = "") -> list[tuple[float, ...]]:
        """Return the log-probability of each token as the first of the answer, (N + 1, len(tokens)).

        Row k has passage k alone, the last row has no passage.
        """
        raise self._no_reading()

    def log_odds(
        self,
        layout: Layout,
        yes: Sequence[str],
        no: Sequence[str],
        salt: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> tuple[float, ...]:
        """Return log p(yes) - log p(no) as the beginning of the answer after each passage alone, and without any.

        For generators without a known vocabulary, such as servers. ``check`` is called while the answers are awaited;
        an exception of ``check`` ends the judgement.
        """
        raise self._no_reading()

    def projected_states(self, token_ids: Sequence[int], marked: Sequence[int]) -> list[tuple[float, ...]]:
        """Return the state of each marked token of a prompt after the projector, (len(marked), P); indices from 0."""
        raise self._no_reading()

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
        raise self._no_reading()

    def passage_attention(
        self, layouts: Sequence[Layout], salt: str = "", check: Callable[[], None] | None = None
    ) -> list[tuple[float, ...]]:
        """Return for each prompt and passage the mean attention per token from the prompt's last token.

        ``check`` is called between forward passes; an exception of ``check`` ends the computation.
        """
        raise self._no_reading()

    def _no_reading(self) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{type(self).__name__} reads no passages for rerankers; give the reranker an engine, or use the "
            "embedding or the cross_encoder reranker"
        )


Inner = TypeVar("Inner", bound=Generator)


class DelegatingGenerator(Generator, Generic[Inner]):
    """Base of generators that answer with another one, whose model they describe. A subclass implements ``stream``."""

    def __init__(self, inner: Inner) -> None:
        self._inner = inner
        self.model_id, self.fingerprint = inner.model_id, inner.fingerprint
        self.context_window, self.encoder = inner.context_window, inner.encoder
        self.capabilities = inner.capabilities & {"log_probs"}

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        return self._inner.describe(choice)

    def check_json_schema(self, schema: str) -> None:
        self._inner.check_json_schema(schema)


def display_name(model_id: str) -> str:
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
