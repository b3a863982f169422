"""A generator whose answers are computed by replicas, and computed again if a replica is lost. No Ray is imported.

An answer is a pure function of its request: greedy, or sampled from a seed. A request without a seed gets one here, so
that a second replica gives the same answer as the first. What was sent already is compared with the second answer and
left out of it; where the two differ, which the last digits of bfloat16 can cause, the answer ends with an error.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Generated
from dataclasses import dataclass, field, replace
from typing import Protocol

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Chunk, GenerationRequest, ScoredToken
from rag_posfix.errors import ConfigError, UpstreamError
from rag_posfix.generation.delegating import DelegatingGenerator
from rag_posfix_api.ray_serve.routed_request import RoutedRequest

_log = logging.getLogger(__name__)


class ReplicaLost(UpstreamError):
    """The replica died, or cannot be reached, before its answer was complete."""


class Replicas(Protocol):
    """What answers requests, somewhere else. ``serve_handle.ServeReplicas`` implements it with Ray Serve."""

    def ask(self, request: RoutedRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces; closing the iterator stops the replica's work.

        Raises:
            ReplicaLost: the replica is gone; another one may be asked.
            RagPosfixError: what the replica raised.
        """
        ...


class ReplicatedGenerator(DelegatingGenerator[Generator]):
    """Implements ``contracts.generator.Generator`` with the answers of replicas.

    Args:
        described: Says of the model what needs no weights: name, tokenizer, context window. It answers nothing.
        attempts: How often one request is sent, >= 1, each time to a replica that is alive.
        new_seed: Returns the seed of a request that samples without one.

    Raises:
        ConfigError: ``attempts`` is below 1.
    """

    def __init__(
        self,
        described: Generator,
        replicas: Replicas,
        attempts: int = 4,
        new_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        if attempts < 1:
            raise ConfigError(f"attempts={attempts} must be >= 1")
        super().__init__(described)
        self._replicas = replicas
        self._attempts = attempts
        self._new_seed = new_seed

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces; the last chunk carries the whole.

        Raises:
            UpstreamError: every attempt lost its replica, or the second answer does not begin as the first did.
            RagPosfixError: what the replica raised.
        """
        routed = RoutedRequest.of(self._repeatable(request))
        sent = _Sent()
        for attempt in range(1, self._attempts + 1):
            chunks = self._replicas.ask(routed)
            try:
                yield from sent.unsent(chunks)
                return
            except ReplicaLost as lost:
                if attempt == self._attempts:
                    raise UpstreamError(
                        f"{attempt} replicas were lost while they answered; ask again later, or raise attempts"
                    ) from lost
                _log.warning("a replica was lost after %d characters of an answer; asking another", len(sent.text))
            finally:
                if isinstance(chunks, Generated):  # any other iterator has nothing to close
                    chunks.close()

    def _repeatable(self, request: GenerationRequest) -> GenerationRequest:
        if request.sampling.deterministic:
            return request
        return replace(request, sampling=replace(request.sampling, seed=self._new_seed()))


@dataclass(slots=True)
class _Sent:
    """What of an answer the reader has."""

    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)

    def unsent(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield what ``chunks`` have beyond what was sent, by any earlier answer or this one.

        Raises:
            UpstreamError: the text of ``chunks`` is not that which was sent.
        """
        text, scored = "", 0
        for chunk in chunks:
            text, before = text + chunk.text, len(text)
            common = min(len(text), len(self.text))
            if text[before:common] != self.text[before:common]:
                raise UpstreamError(
                    "the replica was lost after a part of the answer was sent, and another replica's answer differs "
                    "from that part; ask again"
                )
            new = self._unsent_tokens(chunk.log_probs, scored)
            scored += len(chunk.log_probs)
            fresh = text[len(self.text) :]
            self.text += fresh
            if fresh or new or chunk.generation is not None:
                yield Chunk(fresh, chunk.generation, new)

    def _unsent_tokens(self, tokens: Sequence[ScoredToken], at: int) -> tuple[ScoredToken, ...]:
        new = tuple(tokens[max(0, len(self.scored) - at) :])
        self.scored.extend(new)
        return new
