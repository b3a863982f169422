"""A generator with admission: it runs with a permit only, and stops when the client has disconnected."""

from __future__ import annotations

from collections.abc import Generator as Generated
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from functools import partial

from rag_posfix.contracts.generator import Generator, WatchedGenerator
from rag_posfix.contracts.request import Chunk, GenerationRequest
from rag_posfix.generation.delegating import DelegatingGenerator
from rag_posfix_api.runtime.admission import Admission, Ticket

__all__ = ["TICKET", "AdmittedGenerator"]

TICKET: ContextVar[Ticket | None] = ContextVar("rag_posfix_service_ticket", default=None)
"""The ticket of the request that this thread works for."""


class AdmittedGenerator(DelegatingGenerator[Generator]):
    """A ``contracts.generator.Generator`` that takes a permit for each answer of another generator.

    Whole answers are generated as streams too, so that they can be stopped between two steps. A generator that
    computes ahead of its readers checks the ticket itself, and releases the permit when its computation is done.

    Args:
        generator: The generator.
        admission: Hands out the permits.
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
        self._admission.acquire(ticket)
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
