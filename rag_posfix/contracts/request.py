"""Requests to a generator, their results and the text of a prompt. Plain data, without torch.

Code below this interface has token spans only; code above it has only these types. The salt of the cache keys of the
running call is in a ``ContextVar``: langchain's interface calls a reranker with documents and a question only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass, field, fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Literal

from rag_posfix.checked import check_type
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError, GenerationError
from rag_posfix.parameters import shown
from rag_posfix.plan.layout import Layout
from rag_posfix.text import content_hash

__all__ = ["MitigationChoice", "Sampling"]

FinishReason = Literal["stop", "length"]

MIN_LOGPROB = -9999.0
"""Log-probabilities are at least this, as in OpenAI's API: JSON has no infinity."""

MAX_TOP_LOGPROBS = 20
"""Alternatives of a token that a request may ask for."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token and its log-probability.

    Attributes:
        data: The bytes of the token; they need not be complete characters.
        log_prob: Natural logarithm of its probability, at least ``MIN_LOGPROB``; None for the first token of a prompt.
    """

    data: bytes
    log_prob: float | None

    @property
    def text(self) -> str | None:
        """The text of the token, or None if its bytes are no complete characters."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return None


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer or a prompt, with the tokens that were likeliest in its place.

    Attributes:
        token: The token.
        start: Characters of the answer (or the prompt) before it. The token that ends an answer, and tokens of a stop
            string, start at the end of the answer's text or later.
        top: The likeliest tokens, best first.
    """

    token: TokenScore
    start: int
    top: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        max_tokens: Maximum number of tokens of the answer, >= 1.
        temperature: 0 is greedy; above 0, the divisor of the logits, at most 5.
        top_p: Samples from the most likely tokens up to this total probability, in (0, 1].
        top_k: Samples from this many of the most likely tokens; 0 for all.
        seed: 64-bit seed; None draws a new one.
        stop: Strings that end the answer; the answer ends before the first of them. One string may be given alone.
        top_logprobs: Number of likeliest tokens, 0 to 20, whose log-probabilities come with that of each token of the
            answer; None for no log-probabilities.
        json_schema: A JSON schema that the answer follows, as an object or its text; None for free text. An answer
            that ``max_tokens`` cuts is the beginning of such a JSON text. The fixed text where no passage was found is
            no JSON: look at ``Answer.grounded`` before you parse.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    json_schema: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, kind, allowed in (
            ("max_tokens", Integral, "a whole number"),
            ("temperature", Real, "a number"),
            ("top_p", Real, "a number"),
            ("top_k", Integral, "a whole number"),
            ("seed", Integral | None, "a whole number or None"),
            ("top_logprobs", Integral | None, "a whole number or None"),
        ):
            check_type(name, getattr(self, name), kind, allowed)
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
            raise ConfigError(f"stop={shown(self.stop)} must be a string or a list of strings")
        object.__setattr__(self, "stop", tuple(stops))
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens} must be >= 1")
        if not 0.0 <= self.temperature <= 5.0:
            raise ConfigError(f"temperature={self.temperature} must be between 0 (greedy) and 5")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be >= 0 (0 keeps all tokens)")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigError(f"seed={self.seed} must be between -2**63 and 2**64 - 1")
        if any(not stop for stop in self.stop):
            raise ConfigError("stop holds an empty string; leave it out or give at least one character")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ConfigError(f"top_logprobs={self.top_logprobs} must be between 0 and {MAX_TOP_LOGPROBS}")
        for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "top_logprobs"):
            if (value := getattr(self, name)) is not None:  # NumPy's numbers are no JSON, and differ in cache keys
                object.__setattr__(self, name, float(value) if name in ("temperature", "top_p") else int(value))

    @property
    def deterministic(self) -> bool:
        """Whether the same prompt always gives the same answer."""
        return self.temperature == 0.0 or self.seed is not None


def _schema_text(schema: object) -> str | None:
    """Return a JSON schema as text, its properties in their order; they are written in this order."""
    if schema is None:
        return None
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, Mapping):
            raise ConfigError(f"json_schema is {type(parsed).__name__}, must be a JSON schema: an object")
        return json.dumps(dict(parsed), ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"json_schema is no JSON: {error}; give Model.model_json_schema() or its text") from error


MitigationChoice = MethodSpec
"""A mitigation by name, with its parameters."""


@dataclass(frozen=True, slots=True)
class MitigationInfo:
    """The properties of a checked mitigation that caching needs.

    Attributes:
        name: Registry name.
        fingerprint: Digest of the method and every parameter.
        order_invariant: Whether the answer is the same for every order of the passages.
    """

    name: str
    fingerprint: str
    order_invariant: bool


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to answer with one mitigation.

    Attributes:
        layout: The prompt.
        mitigation: The mitigation and its parameters.
        sampling: Sampling parameters.
        salt: Cached keys and values are shared only with requests of the same salt: one per tenant.
        attribution: Whether the answer has the shares of the passages in each token.
        prompt_scored: Whether the tokens of the prompt come back with their log-probabilities, with
            ``sampling.top_logprobs`` alternatives each. For prompts without passages.
        cues: ``PromptTemplate.cues``. They end the answer as stop strings do; ``Generation.stop_string`` names none.
    """

    layout: Layout
    mitigation: MitigationChoice = field(default_factory=MitigationChoice)
    sampling: Sampling = field(default_factory=Sampling)
    salt: str = ""
    attribution: bool = False
    prompt_scored: bool = False
    cues: tuple[str, ...] = ()


def named_stop(found: object, sampling: Sampling) -> str | None:
    """Return the stop string that ended an answer; None for a cue of the template, which nobody asked about."""
    return found if isinstance(found, str) and found in sampling.stop else None


@dataclass(frozen=True, slots=True)
class TokenSource:
    """The shares of the passages in one generated token.

    Attributes:
        end: Length of the answer in characters after this token.
        shares: Share of each passage (in the order of the layout) in the attention to passages of the query that
            chose the token. Rows have the weights of the plan. The shares sum to 1, or to less if rows without
            passages have weight.
    """

    end: int
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts, defined as in OpenAI's API."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete answer.

    Attributes:
        text: The answer, without special tokens and stop strings.
        token_ids: Every generated token, the end-of-turn token included.
        finish_reason: ``stop`` (end of turn or a stop string) or ``length``.
        usage: Token counts.
        attention: Share of each passage (in the order of the layout) in the attention of the first generated token to
            passages; sums to 1, empty without passages.
        weighted: Whether ``attention`` and ``sources`` are the weights of experts that read one passage each.
        sources: The shares of the passages in each token, if the request has ``attribution``.
        timings: Seconds by stage: ``prefill``, ``decode``, and ``queue`` if requests wait for the model.
        log_probs: Every generated token with its log-probability, if the request asked for ``top_logprobs``: by the
            distribution that the plan combines its rows to.
        prompt_log_probs: Every token of the prompt with its log-probability, if the request asked for
            ``prompt_scored``; the first token has none.
        stop_string: The stop string that ended the answer, or None.
        is_known_end: False if a server ended the answer for a reason that is not known; it is not cached.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    attention: tuple[float, ...] = ()
    sources: tuple[TokenSource, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    log_probs: tuple[ScoredToken, ...] = ()
    prompt_log_probs: tuple[ScoredToken, ...] = ()
    stop_string: str | None = None
    weighted: bool = False
    is_known_end: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer. The last one has the complete ``generation`` and may have no text.

    ``log_probs`` are the tokens of this piece, if the request asked for them. A token whose text is not certain yet
    comes with a later piece.
    """

    text: str
    generation: Generation | None = None
    log_probs: tuple[ScoredToken, ...] = ()


def collect_stream(chunks: Iterable[Chunk]) -> Generation:
    """Return the generation of the last chunk of a stream.

    Raises:
        GenerationError: no chunk has a generation.
    """
    for chunk in chunks:
        if chunk.generation is not None:
            return chunk.generation
    raise GenerationError("the stream ended without its generation; please report this")


_SALT: ContextVar[str] = ContextVar("rag_posfix_salt", default="")


def current_salt() -> str:
    """Return the salt of the running call; "" without one."""
    return _SALT.get()


@contextmanager
def salted(salt: str) -> Iterator[None]:
    """Run the block with the salt ``salt``."""
    token = _SALT.set(salt)
    try:
        yield
    finally:
        _SALT.reset(token)


_SCOPE = re.compile(r"\|scope:[0-9a-f]{32}")


def scoped_salt(salt: str, scope: str) -> str:
    """Return a tenant's salt for those who may read less than the tenant: they find what they stored alone.

    The tenant drops their entries with its own: ``tenant_tags`` are those of ``salt``.
    """
    return f"{salt}|scope:{hashlib.blake2b(scope.encode(), digest_size=16).hexdigest()}"


def tenant_tags(salt: str, tags: Sequence[str]) -> tuple[str, ...]:
    """Return the tags by which one tenant drops its entries alone, those of ``scoped_salt`` too.

    No other tenant's salt gives the same ones. An empty salt has no tenant tags. ``tags`` drop entries over all salts.
    """
    if not salt:
        return ()
    salt = _SCOPE.sub("", salt)
    return tuple(hashlib.blake2b(repr((salt, tag)).encode(), digest_size=16).hexdigest() for tag in tags)


BLANK_LINE = "\n\n"


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The text of a prompt, apart from question and passages.

    The user's turn is: instruction, blank line, passages, question prefix, question, answer cue. Passages have no
    numbers, because a number would reveal the position. Without passages the turn is the question alone.

    Attributes:
        instruction: Text before the passages; may be empty.
        heading: Text before a passage that has a title; ``{title}`` is replaced. May be empty.
        separator: Text after every passage.
        question_prefix: Text before the question.
        answer_cue: Text after the question.
        system: A system message before all others; none if empty.
        history_first: Whether the passages are in the user's last turn, after system message and history of the
            caller, so that they are encoded anew in every turn and for every user. By default they are in the first
            turn, after constant text only.
        no_passage: The answer, in the language of the template, to a question without a passage, where the settings
            have the default text. It is no part of the prompt.
    """

    instruction: str = (
        "Answer the question using only the passages below. Some of them may be irrelevant. Give a short answer."
    )
    heading: str = "{title}\n"
    separator: str = BLANK_LINE
    question_prefix: str = "Question: "
    answer_cue: str = "\nAnswer:"
    system: str = ""
    history_first: bool = False
    no_passage: str = ""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, is_text = getattr(self, setting.name), isinstance(setting.default, str)
            if not isinstance(value, str if is_text else bool):
                kind = "a string" if is_text else "true or false"
                raise ConfigError(f"prompt template: {setting.name} is {type(value).__name__}, must be {kind}")
        if self.heading and "{title}" not in self.heading:
            raise ConfigError(
                f"prompt template: heading={self.heading!r} must contain '{{title}}'; leave it empty for no headings"
            )

    @property
    def opening(self) -> str:
        """The text before the first passage in the user's turn."""
        return self.instruction + BLANK_LINE if self.instruction else ""

    @property
    def cues(self) -> tuple[str, ...]:
        """The lines that begin a new question or answer, with the line break before them; they end an answer.

        Of the prefix of the question and of the cue of the answer, the last line with text; of a colon, both widths,
        without a space before it. A line of letters alone ends an answer only if the template ends the line there,
        because sentences begin with the same words.
        """
        found = (cue for text in (self.question_prefix, self.answer_cue) for cue in _line_cues(text))
        return tuple(dict.fromkeys(found))

    def heading_for(self, title: str) -> str:
        """Return the heading of a passage; empty without a title."""
        return self.heading.replace("{title}", title) if title else ""

    def fingerprint(self) -> str:
        """Return a hash of the fields that the prompt depends on; part of every cache key."""
        return _fingerprint(self)


def _line_cues(text: str) -> tuple[str, ...]:
    body = text.rstrip()
    label, rest = body.rpartition("\n")[2].strip(), text[len(body) :]
    if not any(character.isalnum() for character in label):
        return ()
    if label[-1] in ":\uff1a":
        return (f"\n{label}", f"\n{label[:-1].rstrip()}:")
    if "\n" in rest:
        return (f"\n{label}\n",)
    return () if label[0].isalnum() and label[-1].isalnum() else (f"\n{label}",)


@lru_cache(maxsize=64)
def _fingerprint(template: PromptTemplate) -> str:
    *texts, history_first, _ = astuple(template)
    return content_hash("prompt-template", *texts, *(["history-first"] if history_first else []))
