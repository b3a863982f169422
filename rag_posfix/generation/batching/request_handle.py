"""One request on its way through a generator that works ahead: the pieces of its answer wait here for its consumer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue

from rag_posfix.contracts.request import Chunk, GenerationRequest
from rag_posfix.generation.batching.stepped import SteppedGenerator
from rag_posfix.generation.decode.writer import Writer

__all__ = ["Delivery", "Running"]


def _nothing() -> None:
    """Stand for a watcher that nobody gave."""


class Delivery:
    """A request and what there is of its answer. One thread works for it, another takes; neither waits to put.

    Args:
        request: What is asked.
        check: Raises if the answer is not wanted any more.
        released: Called once, when nothing more will be computed.
    """

    def __init__(
        self,
        request: GenerationRequest,
        check: Callable[[], None] = _nothing,
        released: Callable[[], None] = _nothing,
    ) -> None:
        self.request = request
        self._check = check
        self._released = released
        self._pieces: SimpleQueue[Chunk | Exception] = SimpleQueue()
        self._cancelled = False
        self._over = False
        self._asked = time.perf_counter()

    @property
    def age(self) -> float:
        """Seconds since it was asked."""
        return time.perf_counter() - self._asked

    def take(self) -> Chunk:
        """Return the next piece; wait for it. Raises what the answer failed with."""
        piece = self._pieces.get()
        if isinstance(piece, Chunk):
            return piece
        try:
            raise piece
        finally:
            del piece  # its traceback holds this frame

    def cancel(self) -> None:
        """Tell that nobody takes any more. Takes no lock, so that a garbage collector may call it anywhere."""
        self._cancelled = True

    def is_wanted(self) -> bool:
        """Return whether to go on; if not, that was the last word to whoever takes."""
        if self._cancelled:
            self._end()
            return False
        try:
            self._check()
        except Exception as error:
            self.fail(error)
            return False
        return True

    def put(self, chunk: Chunk) -> None:
        """Hand in a piece; the one with the whole answer is the last."""
        if chunk.generation is not None:
            self._end()
        self._pieces.put(chunk)

    def fail(self, error: Exception) -> None:
        """Hand in what is raised in place of all further pieces."""
        self._end()
        self._pieces.put(error)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._released()


class Running:
    """A request whose prompt has been read, between two steps. Writes as ``Engine.resume`` does.

    Args:
        engine: Reads the prompt, here.
        delivery: Where the pieces go.

    Raises:
        RagPosfixError: those of ``Engine.open``.
    """

    def __init__(self, engine: SteppedGenerator, delivery: Delivery) -> None:
        request = delivery.request
        self._waited = delivery.age
        self.delivery = delivery
        self.session = engine.open(request.layout, request.mitigation, request.sampling.max_tokens, request.salt)
        self._writer = Writer(engine.encoder, self.session, request)

    @property
    def token(self) -> int:
        """The token that was written last: the next step reads it."""
        return self._writer.last

    def write(self) -> bool:
        """Choose the next token and deliver its text; return whether the answer goes on."""
        writer = self._writer
        if new := writer.write(self.session.next_log_probs()):
            self.delivery.put(Chunk(new))
        if writer.done:
            text, generation = writer.end()
            timings = {"queue": self._waited, **generation.timings}
            self.delivery.put(Chunk(text, replace(generation, timings=timings)))
        return not writer.done
