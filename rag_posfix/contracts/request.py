"""What a generator is asked and what it answers. Plain data: no torch, no model.

Below this line there are only token spans; above it, only these types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError, GenerationError
from rag_posfix.plan.layout import Layout

__all__ = [
    "Chunk",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "MitigationChoice",
    "MitigationInfo",
    "Sampling",
    "TokenSource",
    "Usage",
    "whole_answer",
]

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_tokens: At most this many new tokens, >= 1.
        temperature: 0 is greedy; above, scores are divided by it, at most 5.
        top_p: Keep the most likely tokens up to this probability, in (0, 1].
        top_k: Keep this many tokens; 0 keeps all.
        seed: Seeds sampling, of 64 bits; None draws a fresh one.
        stop: Strings that end the answer; the answer is cut before the first of them.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
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

    @property
    def deterministic(self) -> bool:
        """Whether the same prompt always gives the same answer."""
        return self.temperature == 0.0 or self.seed is not None


MitigationChoice = MethodSpec
"""A mitigation by name, with its parameters."""


@dataclass(frozen=True, slots=True)
class MitigationInfo:
    """What is known of a checked mitigation without running it.

    Attributes:
        name: Registry name.
        fingerprint: Changes with the method and every parameter.
        order_invariant: Whether the answer is the same for every order of the passages.
    """

    name: str
    fingerprint: str
    order_invariant: bool


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to answer with one mitigation.

    Attributes:
        layout: The prompt.
        mitigation: What is done differently.
        sampling: How tokens are chosen.
        salt: Keys and values that are kept are shared with requests of the same salt only: one per tenant.
        traced: Whether the answer says which passages each of its tokens comes from.
    """

    layout: Layout
    mitigation: MitigationChoice = field(default_factory=MitigationChoice)
    sampling: Sampling = field(default_factory=Sampling)
    salt: str = ""
    traced: bool = False


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Which passages a generated token comes from.

    Attributes:
        end: How many characters of the answer are written with it.
        shares: Share of each passage (in the order of the layout) in the attention to passages of the query that
            chose the token, rows weighted as the plan weights them; they sum to 1, or to less where rows without
            passages speak.
    """

    end: int
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written, as OpenAI's API counts them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete answer.

    Attributes:
        text: The answer, special tokens and stop strings left out.
        token_ids: Every generated token, the end-of-turn token included.
        finish_reason: ``stop`` (end of turn or a stop string) or ``length``.
        usage: Token counts.
        attention: Share of each passage (in the order of the layout) in the attention that the first generated
            token pays to passages; sums to 1, empty without passages.
        sources: Which passages each token comes from, where the request was traced and the generator can tell.
        timings: Seconds by stage: ``prefill``, ``decode``; also ``queue`` where requests wait for the model.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    attention: tuple[float, ...] = ()
    sources: tuple[TokenSource, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer. The last one carries the complete ``generation`` and may have no text."""

    text: str
    generation: Generation | None = None


def whole_answer(chunks: Iterable[Chunk]) -> Generation:
    """Return what the last chunk of a stream carries.

    Raises:
        GenerationError: no chunk carries it.
    """
    for chunk in chunks:
        if chunk.generation is not None:
            return chunk.generation
    raise GenerationError("the stream ended without its generation; please report this")
