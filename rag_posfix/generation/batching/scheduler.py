"""Continuous batching: answers many requests at the same time with one model, whose decode steps they share.

Requests join and leave between any two steps. The answers are those of the engine, one request at a time: to the last
bit with a batch-invariant model (``generation/model/batch_invariance.py``), else up to rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence

from rag_posfix.contracts.generator import PassageReader
from rag_posfix.contracts.request import Chunk, GenerationRequest
from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.generation.batching.request_handle import RequestHandle
from rag_posfix.generation.batching.stepped import SteppedGenerator
from rag_posfix.generation.batching.worker import CLOSING_SECONDS, Worker
from rag_posfix.generation.delegating import DelegatingGenerator
from rag_posfix.plan.layout import Layout

__all__ = ["BatchingGenerator"]


class BatchingGenerator(DelegatingGenerator[SteppedGenerator]):
    """Answers any number of requests, of any threads, in one thread of its own. Implements ``Generator``.

    Between two steps at most one prompt is read: a newcomer waits one prompt and one step for each that came before
    it, and running answers pause for one prompt at most. ``timings["queue"]`` of an answer is the time until its
    prompt was begun; ``timings["decode"]`` holds the work of its neighbours.

    Cost: memory for the caches of ``max_running`` prompts.

    Args:
        max_running: Answers that are decoded at the same time, >= 1; further requests wait, first come first served.
        on_step: Called before each decode step, in the thread of the model, with the number of answers that share it.

    Raises:
        ConfigError: ``max_running`` is below 1.
    """

    def __init__(
        self, engine: SteppedGenerator, max_running: int = 8, on_step: Callable[[int], None] | None = None
    ) -> None:
        if max_running < 1:
            raise ConfigError(f"max_running={max_running} must be >= 1")
        super().__init__(engine)
        self._max_running = max_running
        self._on_step = on_step
        self._worker = Worker(engine, max_running, on_step)
        weakref.finalize(self, self._worker.stop)  # the thread holds the worker, and would outlive whoever forgets it

    @property
    def engine(self) -> SteppedGenerator:
        """The model."""
        return self._inner

    @property
    def waiting(self) -> int:
        """How many requests wait; the one whose prompt is being read is still among them."""
        return self._worker.waiting

    @property
    def closed(self) -> bool:
        """Whether it was closed: further requests are refused."""
        return self._worker.closed

    def with_engine(self, engine: SteppedGenerator) -> BatchingGenerator:
        """Return a generator of the same size over another engine; this one stays as it is."""
        return BatchingGenerator(engine, self._max_running, self._on_step)

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer piece by piece; the last chunk carries the whole.

        Nothing happens before the first piece is asked for. From then on the answer is computed at the model's pace,
        whether its pieces are read or not. Closing the iterator takes the answer out before the next step.

        Raises:
            RagPosfixError: those of ``Engine.open``, when the first piece is asked for.
            GenerationError: a step that several answers shared failed, or this generator was closed.
        """
        yield from self._chunks(RequestHandle(request))

    def stream_watched(
        self, request: GenerationRequest, check: Callable[[], None], released: Callable[[], None]
    ) -> Iterator[Chunk]:
        """As ``stream``, followed from outside. Both functions run in the thread of the model: they must be quick.

        Args:
            check: Called before each step; what it raises ends the answer there, and is raised in the stream.
            released: Called when the model has done its last work for the answer, although pieces of it may still
                wait to be read. Not called where the stream raises before it is taken in.
        """
        yield from self._chunks(RequestHandle(request, check, released))

    def question_likelihood(self, layout: Layout, salt: str = "") -> tuple[float, ...]:
        """As ``Engine.question_likelihood``, in the thread of the caller: beside the answers, not between them."""
        return self._reader().question_likelihood(layout, salt)

    def question_attention(
        self,
        layouts: Sequence[Layout],
        salt: str = "",
        check: Callable[[], None] | None = None,
        layers: Collection[int] | None = None,
        heads: Collection[tuple[int, int]] | None = None,
    ) -> list[tuple[tuple[float, ...], ...]]:
        """As ``Engine.question_attention``, in the thread of the caller."""
        return self._reader().question_attention(layouts, salt, check, layers, heads)

    def passage_attention(
        self, layouts: Sequence[Layout], salt: str = "", check: Callable[[], None] | None = None
    ) -> list[tuple[float, ...]]:
        """As ``Engine.passage_attention``, in the thread of the caller."""
        return self._reader().passage_attention(layouts, salt, check)

    def _reader(self) -> PassageReader:
        if not isinstance(self._inner, PassageReader):
            raise UnsupportedModelError(
                f"{type(self._inner).__name__} reads no passages for rerankers; give the reranker an engine, or use "
                "the embedding or the cross_encoder reranker"
            )
        return self._inner

    def close(self, timeout_seconds: float = CLOSING_SECONDS) -> None:
        """End the thread, after the prompt or step that it is at. Open answers fail with ``GenerationError``.

        Raises:
            GenerationError: the model is still at it after ``timeout_seconds``.
        """
        self._worker.close(timeout_seconds)

    def _chunks(self, handle: RequestHandle) -> Iterator[Chunk]:
        self._worker.submit(handle)
        try:
            while True:
                chunk = handle.next_chunk()
                yield chunk
                if chunk.generation is not None:
                    return
        finally:
            handle.cancel()
