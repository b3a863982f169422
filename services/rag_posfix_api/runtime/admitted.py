"""Generator, answer cache and precomputation with admission.

The generator runs with a permit only, and stops when the client has disconnected. Who waits for an equal question, or
computes its answer, has a queue slot.
"""

from __future__ import annotations

import time
from collections.abc import Generator as Generated
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from rag_posfix.contracts.generator import Generator, WatchedGenerator
from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest
from rag_posfix.generation.delegating import DelegatingGenerator
from rag_posfix.pipeline.precompute import AnswerCache
from rag_posfix_api.http.metrics import ANSWER, Metrics
from rag_posfix_api.runtime.admission import TICKET, Admission, Ticket


class AdmittedGenerator(DelegatingGenerator[Generator]):
    """A ``contracts.generator.Generator`` that takes a permit for each answer of another generator.

    Whole answers are generated as streams too, so that they can be stopped between two steps. A generator that
    computes ahead of its readers checks the ticket itself, and releases the permit when its computation is done.
    ``metrics`` count the first token of each request, and the further tokens and the waiting of each answer.
    """

    def __init__(self, generator: Generator, admission: Admission, metrics: Metrics | None = None) -> None:
        super().__init__(generator)
        self._admission = admission
        self._metrics = metrics

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces. The permit is released when the stream ends, fails or is closed, or earlier."""
        ticket = TICKET.get()
        if ticket is None:  # a question of this process itself, such as the one that warms the model
            yield from self._inner.stream(request)
        elif self._metrics is None:
            yield from self._admit(request, ticket)
        else:
            yield from _measure(self._admit(request, ticket), ticket, self._metrics)

    def _admit(self, request: GenerationRequest, ticket: Ticket) -> Generated[Chunk, None, None]:
        self._admission.acquire(ticket, len(request.layout.token_ids) + request.sampling.max_tokens)
        if isinstance(self._inner, WatchedGenerator):
            stream = self._inner.stream_watched(request, ticket.check, partial(self._admission.release, ticket))
        else:
            stream = self._inner.stream(request)
        try:
            for chunk in stream:
                if chunk.generation is None:
                    ticket.check()
                    yield chunk
                else:
                    timings = chunk.generation.timings
                    timings = {**timings, "queue": ticket.queued_seconds + timings.get("queue", 0.0)}
                    yield replace(chunk, generation=replace(chunk.generation, timings=timings))
        finally:
            if isinstance(stream, Generated):  # other iterators have no ``close``
                stream.close()
            self._admission.release(ticket)


def _measure(chunks: Generated[Chunk, None, None], ticket: Ticket, metrics: Metrics) -> Iterator[Chunk]:
    generation: Generation | None = None
    try:
        for chunk in chunks:
            generation = chunk.generation
            if not ticket.has_text and (chunk.text or generation is not None):
                ticket.has_text = True
                metrics.first_token.observe(time.monotonic() - ticket.started)
            if generation is not None:
                tokens_after_first = generation.usage.completion_tokens - 1
                # From the generator's clock: waiting for a slow client is not the model's work.
                seconds = generation.timings.get("decode")
                if tokens_after_first > 0 and seconds is not None:
                    metrics.output_token.observe(seconds / tokens_after_first)
            yield chunk
    finally:
        chunks.close()
        metrics.count_wait(ANSWER, ticket.queued_seconds if generation is None else generation.timings["queue"])


class AdmittedCache:
    """An answer cache whose ``single_flight`` takes a queue slot: the slots are for requests that wait."""

    def __init__(self, cache: AnswerCache, admission: Admission) -> None:
        self._cache = cache
        self._admission = admission

    def get(self, key: str) -> Mapping[str, Any] | None:
        return self._cache.get(key)

    @property
    def position(self) -> int:
        return self._cache.position

    def put(
        self, key: str, value: Mapping[str, Any], document_ids: Sequence[str] = (), position: int | None = None
    ) -> None:
        self._cache.put(key, value, document_ids, position)

    @contextmanager
    def single_flight(self, key: str) -> Iterator[bool | None]:
        """Hold while computing ``key``, in a queue slot.

        Raises:
            OverloadedError: all queue slots are taken.
        """
        if (ticket := TICKET.get()) is not None:
            self._admission.take_slot(ticket)
        with self._cache.single_flight(key) as again:
            yield again

    def drop_documents(self, document_ids: Sequence[str]) -> int:
        return self._cache.drop_documents(document_ids)

    @property
    def pending_deletions(self) -> int:
        return int(getattr(self._cache, "pending_deletions", 0))

    def close(self) -> None:
        self._cache.close()
