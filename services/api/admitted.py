"""A generator behind admission: it works with a permit only, and stops when nobody waits for the answer."""

from __future__ import annotations

from collections.abc import Generator as Generated
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from functools import partial

from rag_posfix.errors import GenerationError
from rag_posfix.generation.request import Chunk, Generation, GenerationRequest, MitigationChoice, MitigationInfo
from rag_posfix.protocols import Generator, TokenEncoder, WatchedGenerator
from services.api.admission import Admission, Ticket

__all__ = ["TICKET", "AdmittedGenerator"]

TICKET: ContextVar[Ticket | None] = ContextVar("rag_posfix_service_ticket", default=None)
"""The ticket of the request that this thread works for."""


class AdmittedGenerator:
    """Implements ``protocols.Generator`` around another one.

    Whole answers are read from the stream too, so that they can be stopped between two steps. A generator that works
    ahead of its readers is told to look for itself, and a permit is free when its work is done, not when all is read.

    Args:
        generator: Does the work.
        admission: Gives the permits.
    """

    def __init__(self, generator: Generator, admission: Admission) -> None:
        self._generator = generator
        self._admission = admission

    @property
    def model_id(self) -> str:
        """Name of the model."""
        return self._generator.model_id

    @property
    def fingerprint(self) -> str:
        """Identity of weights and dtype."""
        return self._generator.fingerprint

    @property
    def context_window(self) -> int:
        """Most tokens that prompt and answer may have together."""
        return self._generator.context_window

    @property
    def encoder(self) -> TokenEncoder:
        """The tokenizer."""
        return self._generator.encoder

    def describe(self, choice: MitigationChoice) -> MitigationInfo:
        """Check a mitigation; needs no permit."""
        return self._generator.describe(choice)

    def generate(self, request: GenerationRequest) -> Generation:
        """Return the whole answer."""
        for chunk in self.stream(request):
            if chunk.generation is not None:
                return chunk.generation
        raise GenerationError("the stream ended without its generation; please report this")

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer piece by piece. The permit goes back at the latest when it ends, fails or is closed."""
        ticket = TICKET.get()
        if ticket is None:
            yield from self._generator.stream(request)
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
        if isinstance(self._generator, WatchedGenerator):
            return self._generator.stream_watched(request, ticket.check, partial(self._admission.release, ticket))
        return self._generator.stream(request)
