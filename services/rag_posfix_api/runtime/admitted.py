"""Generator and answer cache with admission.

The generator runs with a permit only, and stops when the client has disconnected. Who waits for an equal question, or
computes its answer, has a place in the queue.
"""

from __future__ import annotations

from collections.abc import Generator as Generated
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from rag_posfix.contracts.generator import Generator, WatchedGenerator
from rag_posfix.contracts.request import Chunk, GenerationRequest
from rag_posfix.generation.delegating import DelegatingGenerator
from rag_posfix.pipeline.stores import AnswerCache
from rag_posfix_api.runtime.admission import Admission, Ticket

TICKET: ContextVar[Ticket | None] = ContextVar("rag_posfix_service_ticket", default=None)
"""The ticket of the request that this thread works for."""


class AdmittedGenerator(DelegatingGenerator[Generator]):
    """A ``contracts.generator.Generator`` that takes a permit for each answer of another generator.

    Whole answers are generated as streams too, so that they can be stopped between two steps. A generator that
    computes ahead of its readers checks the ticket itself, and releases the permit when its computation is done.
    """

    def __init__(self, generator: Generator, admission: Admission) -> None:
        super().__init__(generator)
        self._admission = admission

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces. The permit is released when the stream ends, fails or is closed, or earlier."""
        ticket = TICKET.get()
        if ticket is None:
            yield from self._inner.stream(request)
            return
        self._admission.acquire(ticket, len(request.layout.token_ids) + request.sampling.max_tokens)
        stream = self._opened(request, ticket)
        try:
            for chunk in stream:
                if chunk.generation is None:
                    ticket.check()
                    yield chunk
                else:
                    timings = chunk.generation.timings
                    queued = ticket.queued_seconds + timings.get("queue", 0.0)
                    timings = {**timings, "queue": queued}
                    yield replace(chunk, generation=replace(chunk.generation, timings=timings))
        finally:
            if isinstance(stream, Generated):  # any other iterator has nothing to close
                stream.close()
            self._admission.release(ticket)

    def _opened(self, request: GenerationRequest, ticket: Ticket) -> Iterator[Chunk]:
        if isinstance(self._inner, WatchedGenerator):
            return self._inner.stream_watched(request, ticket.check, partial(self._admission.release, ticket))
        return self._inner.stream(request)


class AdmittedCache:
    """An answer cache whose ``single_flight`` takes a place for the request: waiting is what places are for.

    Args:
        admission: Hands out the places.
    """

    def __init__(self, cache: AnswerCache, admission: Admission) -> None:
        self._cache = cache
        self._admission = admission

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return the stored answer, or None."""
        return self._cache.get(key)

    def put(self, key: str, value: Mapping[str, Any], document_ids: Sequence[str] = ()) -> None:
        """Store an answer."""
        self._cache.put(key, value, document_ids)

    @contextmanager
    def single_flight(self, key: str) -> Iterator[bool | None]:
        """Hold while computing ``key``, with a place.

        Raises:
            OverloadedError: all places are taken.
        """
        ticket = TICKET.get()
        if ticket is not None:
            self._admission.enter(ticket)
        with self._cache.single_flight(key) as again:
            yield again

    def drop_documents(self, document_ids: Sequence[str]) -> int:
        """Drop every answer made from one of these documents."""
        return self._cache.drop_documents(document_ids)

    def close(self) -> None:
        """Close the cache."""
        self._cache.close()
