"""Continuous batching: answers many requests at the same time with one model, whose decode steps they share.

Requests join and leave between any two steps. Answers equal the engine's, one request at a time: to the last
bit with a batch-invariant model (``generation/model/batch_invariance.py``), else up to rounding.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

from rag_posfix.contracts.generator import CachingGenerator, Generator, PassageReader
from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest, whole_answer
from rag_posfix.errors import ConfigError, GenerationError, UnsupportedModelError
from rag_posfix.generation.batching.requests import (
    RequestHandle,
    RunningRequest,
    decode_step,
    write_tokens,
)
from rag_posfix.generation.batching.stepped import PlanningGenerator, SteppedGenerator
from rag_posfix.generation.delegating import DelegatingGenerator
from rag_posfix.generation.model.kv_cache import cache_bytes
from rag_posfix.plan.layout import Layout

__all__ = ["BatchingGenerator"]

CLOSING_SECONDS = 60.0
"""How long ``close`` waits for the prompt or step that the model is at."""


class Worker:
    """Answers requests, first come first served. There is no thread before the first.

    Between two decode steps it prefills at most one prompt: running answers never wait for a whole queue of prompts,
    and a prompt never waits for a running answer to end while fewer than ``max_running`` are decoded.
    """

    def __init__(
        self, engine: SteppedGenerator, max_running: int, on_step: Callable[[int], None] | None = None
    ) -> None:
        self._engine = engine
        self._max_running = max_running
        self._on_step = on_step
        # Its lock is reentrant: a garbage collector may call `stop` in a thread that holds it.
        self._changed = threading.Condition()
        self._waiting: deque[RequestHandle] = deque()  # anyone appends; only the thread removes
        self._running: list[RunningRequest] = []  # the thread's own
        self._thread: threading.Thread | None = None
        self.closed = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_cache_bytes(self) -> int:
        caches = [batch.cache for request in list(self._running) for batch in request.session.batches]
        return cache_bytes(caches)

    def submit(self, handle: RequestHandle) -> None:
        """Queue a request; GenerationError if the worker was closed."""
        with self._changed:
            if self.closed:
                raise GenerationError("the generator is closed; make a new one")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="rag-posfix-generation", daemon=True)
                thread.start()
                self._thread = thread
                # A daemon thread that is still inside the model when the interpreter goes brings the process down.
                atexit.register(self.close)
            self._waiting.append(handle)
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread after the prompt or step that it is at. Returns at once."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def close(self, timeout_seconds: float = CLOSING_SECONDS) -> None:
        """End the thread, fail what is open with ``GenerationError``, and return when that is done.

        Raises:
            GenerationError: the model is still at its prompt or step after ``timeout_seconds``. What is open has
                failed; the thread ends after the step, or with the process.
        """
        thread = self._thread
        self.stop()
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout_seconds)
        if thread.is_alive():
            with self._changed:
                handles = self._open_handles()
            self._fail(handles)
            raise GenerationError(
                f"the generator was closed, and the model is still at a prompt or step after {timeout_seconds:g} s; "
                "end the process if it does not return"
            )

    def _run(self) -> None:
        try:
            while self._has_work():
                self._drop_cancelled()
                self._prefill_one()
                self._drop_cancelled()  # prefill takes long
                if self._on_step is not None and self._running:
                    self._on_step(len(self._running))
                self._running = decode_step(self._running)
        finally:
            self._end()

    def _has_work(self) -> bool:
        """Wait for work; return whether there is any to be done."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._waiting or self._running)
            return not self.closed

    def _drop_cancelled(self) -> None:
        """Drop cancelled requests."""
        with self._changed:
            waiting = list(self._waiting)
        for handle in waiting:
            if not handle.is_wanted():
                with self._changed:
                    self._waiting.remove(handle)
        self._running = [request for request in self._running if request.handle.is_wanted()]

    def _prefill_one(self) -> None:
        """Read the prompt that has waited longest and write its first token, if ``max_running`` permits."""
        if not self._waiting or len(self._running) >= self._max_running:
            return
        handle = self._waiting[0]  # stays there meanwhile: whatever happens, `_end` finds it
        try:
            self._running += write_tokens([RunningRequest(self._engine, handle)])
        except Exception as error:
            handle.fail(error)
        with self._changed:
            self._waiting.popleft()

    def _end(self) -> None:
        with self._changed:
            handles = self._open_handles()
            self._waiting.clear()
            self._running = []
            self._thread = None  # where the thread died of itself, the next request starts another
        atexit.unregister(self.close)
        self._fail(handles)

    def _open_handles(self) -> list[RequestHandle]:
        return [*self._waiting, *(request.handle for request in self._running)]

    def _fail(self, handles: Sequence[RequestHandle]) -> None:
        how = "was closed" if self.closed else "stopped"
        for handle in handles:
            handle.fail(GenerationError(f"the generator {how} before the answer was complete; ask again"))


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
    def kv_cache_bytes(self) -> int:
        """Bytes of the KV caches of the answers that are decoded, their spare capacity included."""
        return self._worker.kv_cache_bytes

    @property
    def closed(self) -> bool:
        """Whether it was closed: further requests are refused."""
        return self._worker.closed

    def with_engine(self, engine: SteppedGenerator) -> BatchingGenerator:
        """Return a generator of the same size over another engine; this one stays as it is."""
        return BatchingGenerator(engine, self._max_running, self._on_step)

    def generate(self, request: GenerationRequest) -> Generation:
        """Return the whole answer. Errors as those of ``stream``."""
        return whole_answer(self._chunks(RequestHandle(request)))

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer piece by piece; the last chunk carries the whole.

        Only the request is checked before the first piece is asked for. From then on the answer is computed at the
        model's pace, whether its pieces are read or not. Closing the iterator takes the answer out before the next
        step.

        Raises:
            RagPosfixError: those of ``Engine.open``, in this call where the engine can plan without reading.
            GenerationError: a step that several answers shared failed, or this generator was closed.
        """
        if isinstance(self._inner, PlanningGenerator):
            self._inner.plan(request.layout, request.mitigation, request.sampling.max_tokens)
        return self._chunks(RequestHandle(request))

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

    def cached_segments(self, request: GenerationRequest) -> tuple[bool, ...]:
        """Return whether the engine's store has the prefix, and each passage, of a prompt. Runs no model."""
        engine = self.engine
        return engine.cached_segments(request) if isinstance(engine, CachingGenerator) else ()

    def question_likelihood(self, layout: Layout, salt: str = "", *, bare: bool = False) -> tuple[float, ...]:
        """As ``Engine.question_likelihood``, in the thread of the caller: beside the answers, not between them."""
        return self._reader().question_likelihood(layout, salt, bare=bare)

    def first_token_log_probs(self, layout: Layout, tokens: Sequence[int], salt: str = "") -> list[tuple[float, ...]]:
        """As ``Engine.first_token_log_probs``, in the thread of the caller."""
        return self._reader().first_token_log_probs(layout, tokens, salt)

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
        schema = handle.request.sampling.json_schema
        if schema is not None:  # here, not in the thread of the model: what is compiled delays every answer
            handle.json_text = self.engine.encoder.json_grammars.begin(schema)
        self._worker.submit(handle)
        try:
            while True:
                chunk = handle.next_chunk()
                yield chunk
                if chunk.generation is not None:
                    return
        finally:
            handle.cancel()


def batched(generator: Generator) -> Generator:
    """Return ``generator`` with continuous batching; unchanged if it has it, or cannot be advanced step by step."""
    return BatchingGenerator(generator) if isinstance(generator, SteppedGenerator) else generator


def unbatched(generator: Generator) -> Generator:
    """Return the generator that ``generator`` batches, or ``generator``."""
    return generator.engine if isinstance(generator, BatchingGenerator) else generator
