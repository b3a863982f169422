"""A generator that measures the answers of another one: first token, each token, and waiting."""

from __future__ import annotations

import time
from collections.abc import Generator as Generated
from collections.abc import Iterator

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest
from rag_posfix.generation.delegating import DelegatingGenerator
from rag_posfix_api.http.metrics import ANSWER, Metrics
from rag_posfix_api.runtime.admission import Ticket
from rag_posfix_api.runtime.admitted import TICKET


class MeasuredGenerator(DelegatingGenerator[Generator]):
    """Measures every answer of a generator that waits for a permit (``AdmittedGenerator``)."""

    def __init__(self, generator: Generator, metrics: Metrics) -> None:
        super().__init__(generator)
        self._metrics = metrics

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces."""
        ticket = TICKET.get()
        if ticket is None:  # a question of this process itself, such as the one that warms the model
            yield from self._inner.stream(request)
            return
        yield from self._measured(self._inner.stream(request), ticket)

    def _measured(self, chunks: Iterator[Chunk], ticket: Ticket) -> Iterator[Chunk]:
        begun = False
        waited: float | None = None
        try:
            for chunk in chunks:
                if not begun and (chunk.text or chunk.generation is not None):
                    begun = True
                    self._metrics.first_token(time.monotonic() - ticket.started)
                if chunk.generation is not None:
                    waited = chunk.generation.timings.get("queue")
                    self._count_tokens(chunk.generation)
                yield chunk
        finally:
            if isinstance(chunks, Generated):
                chunks.close()
            self._metrics.queued(ANSWER, ticket.queued_seconds if waited is None else waited)

    def _count_tokens(self, generation: Generation) -> None:
        further = generation.usage.completion_tokens - 1
        # From the generator's own clock: pieces that wait for a slow client are no work of the model.
        decoded = generation.timings.get("decode")
        if further > 0 and decoded is not None:
            self._metrics.each_token(decoded / further)
