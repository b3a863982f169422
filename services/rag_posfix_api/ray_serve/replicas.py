"""Replicas of the model, on both sides: the actor of a replica, and the service's generator that calls replicas.

An answer is a pure function of its request: greedy, or sampled from a seed. A request without a seed gets one here, so
that a second replica gives the same answer as the first. What was sent already is compared with the second answer and
left out of it; where the two differ, which the last digits of bfloat16 can cause, the answer ends with an error.
No Ray is imported here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from collections.abc import Generator as Generated
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Chunk, GenerationRequest, ScoredToken
from rag_posfix.errors import ConfigError, GenerationError, UpstreamError
from rag_posfix.generation.batching.stepped import SteppedGenerator
from rag_posfix.generation.delegating import DelegatingGenerator
from rag_posfix_api.ray_serve.routing import MAX_MARKS, ReadPassages, RoutedRequest, tags_of

_log = logging.getLogger(__name__)


@runtime_checkable
class HeldPassages(Protocol):
    """The passage KV store, as a replica sees it. ``caching.kv.store.PassageStore`` implements it."""

    def memory_tags(self) -> frozenset[str]: ...

    def stats(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaModel:
    """A loaded model; ``passages`` keeps keys and values for it, None if unknown."""

    generator: Generator
    passages: HeldPassages | None = None


class GeneratorReplica:
    """Answers requests with its own model. Ray Serve makes one per replica and calls its coroutines.

    Args:
        opener: Loads the model, in the process of the replica and by its settings.
        at_once: Answers that share the decode steps of the model.
        waiting: Further requests that may wait for it.
        max_marks: Bound of the sketch.
        report: Called with ``counts`` whenever the sketch is made.
    """

    def __init__(
        self,
        opener: Callable[[], ReplicaModel],
        at_once: int,
        waiting: int = 32,
        max_marks: int = MAX_MARKS,
        report: Callable[[Mapping[str, float]], None] | None = None,
    ) -> None:
        model = opener()
        self._passages = model.passages
        self._model = model.generator
        self._open = 0
        self._decode_steps = 0
        self._decoded_answers = 0
        self._generator = _add_batching(model.generator, at_once, self._note_step)
        self._report = report
        self._read = ReadPassages(max_marks)
        # A thread waits for each answer; the event loop stays free for the queue length, the sketch and the health.
        self._threads = ThreadPoolExecutor(at_once + waiting, thread_name_prefix="answer")

    async def stream(self, routed: RoutedRequest) -> AsyncIterator[Chunk]:
        """Yield the answer in pieces. When the caller goes away, the work stops at its next step.

        Raises:
            RagPosfixError: as ``Generator.stream``.
        """
        self._read.add(tags_of(routed.request))
        self._open += 1
        try:
            # Planning the prompt takes its time too.
            chunks = await asyncio.wrap_future(self._threads.submit(self._generator.stream, routed.request))
            step = self._threads.submit(next, chunks, None)
            try:
                while (chunk := await asyncio.wrap_future(step)) is not None:
                    yield chunk
                    step = self._threads.submit(next, chunks, None)
            finally:
                step.add_done_callback(lambda done: self._close_after_last_step(done, chunks))
        finally:
            self._open -= 1

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the sketch of the passages in memory; Ray Serve sends it to the routers."""
        if self._report is not None:
            self._report(await self.counts())
        held = None if self._passages is None else self._passages.memory_tags()
        return self._read.sketch(held, time.time()).as_stats()

    async def counts(self) -> dict[str, float]:
        """Return the counts of the queue, of the batches, and of the passage KV store if there is one."""
        stats = {} if self._passages is None else self._passages.stats()
        return {
            "in_flight_requests": self._open,
            "waiting_requests": getattr(self._generator, "waiting", 0),
            "decode_steps": self._decode_steps,
            "decoded_answers": self._decoded_answers,
            **{f"passages_{name}": value for name, value in stats.items() if isinstance(value, (int, float))},
        }

    def _note_step(self, answers: int) -> None:
        """Count a decode step of the batch, in the thread of the batch."""
        self._decode_steps += 1
        self._decoded_answers += answers

    async def check_health(self) -> None:
        """Raise if the model cannot answer any more; Ray Serve then replaces the replica.

        Raises:
            GenerationError: a process of a split model died.
        """
        failure: str | None = getattr(self._model, "failure", None)
        if failure is not None:
            raise GenerationError(f"the model cannot answer any more: {failure}")

    def _close_after_last_step(self, step: Future[Chunk | None], chunks: Iterator[Chunk]) -> None:
        """Close an answer after its last step, in the thread of that step; the caller has the error of the step."""
        close = getattr(chunks, "close", None)
        if close is not None:
            close()


def _add_batching(generator: Generator, at_once: int, on_step: Callable[[int], None]) -> Generator:
    """Return ``generator`` with batches of ``at_once`` answers, whatever the batches that it comes with."""
    from rag_posfix.generation.batching.scheduler import BatchingGenerator, unbatched  # torch

    model = unbatched(generator)
    return BatchingGenerator(model, at_once, on_step) if at_once > 1 and isinstance(model, SteppedGenerator) else model


class ReplicaLost(UpstreamError):
    """The replica died, or cannot be reached, before its answer was complete."""


class Replicas(Protocol):
    """What answers requests, somewhere else. ``cluster.ServeReplicas`` implements it with Ray Serve."""

    def ask(self, request: RoutedRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces; closing the iterator stops the replica's work.

        Raises:
            ReplicaLost: the replica is gone; try another one.
            RagPosfixError: an error of the replica.
        """
        ...


class ReplicatedGenerator(DelegatingGenerator[Generator]):
    """Implements ``contracts.generator.Generator`` with the answers of replicas.

    Args:
        description: The model without weights: name, tokenizer, context window. It answers nothing.
        attempts: How often one request is sent, >= 1, each time to a replica that is alive.
        new_seed: Returns the seed of a request that samples without one.

    Raises:
        ConfigError: ``attempts`` is below 1.
    """

    def __init__(
        self,
        description: Generator,
        replicas: Replicas,
        attempts: int = 4,
        new_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        if attempts < 1:
            raise ConfigError(f"attempts={attempts} must be >= 1")
        super().__init__(description)
        self._replicas = replicas
        self._attempts = attempts
        self._new_seed = new_seed

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces; the last chunk carries the whole.

        Raises:
            UpstreamError: every attempt lost its replica, or the second answer does not begin as the first did.
            RagPosfixError: an error of the replica.
        """
        routed = RoutedRequest.of(self._fix_seed(request))
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
                if isinstance(chunks, Generated):  # other iterators have no ``close``
                    chunks.close()

    def _fix_seed(self, request: GenerationRequest) -> GenerationRequest:
        if request.sampling.deterministic:
            return request
        return replace(request, sampling=replace(request.sampling, seed=self._new_seed()))


@dataclass(slots=True)
class _Sent:
    """The text and tokens of an answer that the reader has."""

    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)

    def unsent(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the text and tokens of ``chunks`` that were not sent yet, by an earlier answer or this one.

        Raises:
            UpstreamError: the text of ``chunks`` is not the text that was sent.
        """
        text, scored = "", 0
        for chunk in chunks:
            text, before = text + chunk.text, len(text)
            common = min(len(text), len(self.text))
            ends_early = chunk.generation is not None and len(text) < len(self.text)
            if ends_early or text[before:common] != self.text[before:common]:
                raise UpstreamError(
                    "the replica was lost after a part of the answer was sent, and another replica's answer differs "
                    "from that part; ask again"
                )
            new_tokens = self._unsent_tokens(chunk.log_probs, scored)
            scored += len(chunk.log_probs)
            new_text = text[len(self.text) :]
            self.text += new_text
            if new_text or new_tokens or chunk.generation is not None:
                yield Chunk(new_text, chunk.generation, new_tokens)

    def _unsent_tokens(self, tokens: Sequence[ScoredToken], offset: int) -> tuple[ScoredToken, ...]:
        new = tuple(tokens[max(0, len(self.scored) - offset) :])
        self.scored.extend(new)
        return new
