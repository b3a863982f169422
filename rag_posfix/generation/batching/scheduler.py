"""Continuous batching: answers many requests at the same time with one model, whose decode steps they share.

Requests join and leave between any two steps. Answers equal the engine's, one request at a time: to the last
bit with a batch-invariant model (``generation/model/batch_invariance.py``), else up to rounding.

Requests between two decode steps: the queue of their chunks, their sessions, and the step that they share.

Answers of sessions that are decoded together equal those of one session at a time: to the last bit with a
batch-invariant model (``generation/model/batch_invariance.py``). ``score_batch`` pads answers to the longest, which
changes the last digits: where scores are compared, score them in equal batches.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from rag_posfix.contracts.generator import DelegatingGenerator, Generator
from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest, ScoredToken, collect_stream
from rag_posfix.errors import ConfigError, GenerationError
from rag_posfix.generation.decode.answer_writer import AnswerWriter, Session, choose_together, prefill_with_logprobs
from rag_posfix.generation.model.json_grammar import JsonText
from rag_posfix.generation.model.sequence_batch import SequenceBatch, cache_bytes, forward_batches
from rag_posfix.patching.attention_hook import Observer
from rag_posfix.plan.layout import Layout

if TYPE_CHECKING:
    from rag_posfix.generation.engine import Engine

__all__ = ["BatchingGenerator"]


T = TypeVar("T")

MAX_ROWS = 16
"""Rows that decode together: a step then still costs little more than one row's, because weights are read once."""

MAX_TOKENS = 8 * 3072
"""Keys of all rows that decode together: bounds the memory of a batch."""


@torch.inference_mode()
def advance_batch(sessions: Sequence[Session], tokens: Sequence[int]) -> None:
    """Append a generated token to each session.

    Sessions share one forward pass, whatever their mitigations; sessions of models whose layers do not keep all
    keys advance on their own. Any sessions of one model may come together at any step.
    """
    shared = [i for i, session in enumerate(sessions) if session.can_share_pass]
    if len(shared) < 2:
        shared = []
    for i in sorted(set(range(len(sessions))) - set(shared)):
        sessions[i].advance(tokens[i])
    observers = [sessions[i].observers() for i in shared]
    logits_of = _pass([(sessions[i].batches, [tokens[i]]) for i in shared], 1, observers)
    for i, logits, session_observers in zip(shared, logits_of, observers, strict=True):
        sessions[i].accept(tokens[i], logits[:, -1], session_observers)


@torch.inference_mode()
def score_batch(sessions: Sequence[Session], answers: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """Return what each session's ``score`` returns for its answer; the sessions stay where they are.

    Cost: one forward pass over the longest answer.
    """
    shared = [i for i, session in enumerate(sessions) if session.can_share_pass and len(answers[i]) > 1]
    longest = max((len(answers[i]) - 1 for i in shared), default=0)
    # Padding after an answer is hidden from it by causality.
    padded = [[*answers[i][:-1], *[0] * (longest + 1 - len(answers[i]))] for i in shared]
    ahead = [[batch.branch() for batch in sessions[i].batches] for i in shared]
    logits = dict(zip(shared, _pass(list(zip(ahead, padded, strict=True)), longest), strict=True))
    return [
        session.score_from(answer, logits[i][:, : len(answer) - 1]) if i in logits else session.score(answer)
        for i, (session, answer) in enumerate(zip(sessions, answers, strict=True))
    ]


def _pass(
    appended: Sequence[tuple[Sequence[SequenceBatch], Sequence[int]]],
    keep: int,
    observers: Sequence[Sequence[Observer | None]] | None = None,
) -> list[Tensor]:
    """Append tokens to all rows of each session's batches, in one pass.

    Returns the logits of the last ``keep`` tokens of each session, (R, keep, V). ``observers`` are of each batch of
    each session.
    """
    if not appended:
        return []
    batches = [batch for session_batches, _ in appended for batch in session_batches]
    rows = [tokens for session_batches, tokens in appended for batch in session_batches for _ in range(batch.n_rows)]
    ids = torch.tensor(rows, device=batches[0].loaded.device)  # one upload for all
    ids_of = list(torch.split(ids, [batch.n_rows for batch in batches]))
    flat = None if observers is None else list(itertools.chain.from_iterable(observers))
    logits = iter(forward_batches(batches, ids_of, keep, flat))
    return [torch.cat([next(logits) for _ in session_batches]) for session_batches, _ in appended]


def generate_batch(
    engine: Engine, sessions: Sequence[Session], requests: Sequence[GenerationRequest]
) -> list[Generation]:
    """Return the answers of sessions that have read the requests' prompts. One batch, whatever its size."""
    writers = [AnswerWriter(engine.encoder, s, r) for s, r in zip(sessions, requests, strict=True)]
    while True:
        open_answers = [pair for pair in zip(sessions, writers, strict=True) if not pair[1].done]
        scores = [writer.next_log_probs() for _, writer in open_answers]
        chosen = choose_together([writer.sampler for _, writer in open_answers], scores)
        for (_, writer), token, log_probs in zip(open_answers, chosen, scores, strict=True):
            writer.accept(token, log_probs)
        continuing = [
            (session, writer.last) for session, writer in zip(sessions, writers, strict=True) if not writer.done
        ]
        if not continuing:
            return [collect_stream([writer.end()]) for writer in writers]
        advance_batch([session for session, _ in continuing], [token for _, token in continuing])


def in_batches(items: Iterable[T], session_of: Callable[[T], Session]) -> Iterator[list[T]]:
    """Yield ``items`` in order, in lists whose sessions fit together: few rows and few tokens, at least one item.

    Items are taken as they are needed: an iterator that opens sessions holds one batch of them and one more.
    """
    batch: list[T] = []
    for item in items:
        batches = [b for member in (*batch, item) for b in session_of(member).batches]
        rows = sum(b.n_rows for b in batches)
        tokens = sum(b.n_rows * b.length for b in batches)
        if batch and (rows > MAX_ROWS or tokens > MAX_TOKENS):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


class RequestHandle:
    """A request and a queue of its chunks. The model's thread puts chunks, the consumer's thread takes them.

    Args:
        check: Raises if the request was cancelled or timed out.
        released: Called once, when nothing more will be computed.

    Attributes:
        json_text: The JSON text that the answer is to be, if its schema is compiled already.
    """

    def __init__(
        self,
        request: GenerationRequest,
        check: Callable[[], None] = lambda: None,
        released: Callable[[], None] = lambda: None,
    ) -> None:
        self.request = request
        self._check = check
        self._released = released
        self._chunks: SimpleQueue[Chunk | Exception] = SimpleQueue()
        self._cancelled = False
        self._over = False
        self.json_text: JsonText | None = None
        self.created = time.perf_counter()

    def next_chunk(self) -> Chunk:
        """Return the next chunk; wait for it. Raises what the answer failed with."""
        chunk = self._chunks.get()
        if isinstance(chunk, Chunk):
            return chunk
        try:
            raise chunk
        finally:
            del chunk  # its traceback holds this frame

    def cancel(self) -> None:
        """Stop the answer: no chunk is taken any more. Takes no lock: a garbage collector may call it anywhere."""
        self._cancelled = True

    def is_wanted(self) -> bool:
        """Return whether the answer is still wanted; if not, the stream has ended with the reason."""
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
        """Put a chunk; the one with the whole answer is the last."""
        if chunk.generation is not None:
            self._end()
        self._chunks.put(chunk)

    def fail(self, error: Exception) -> None:
        """Put an exception, which the consumer gets in place of all further chunks."""
        self._end()
        self._chunks.put(error)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._released()


class RunningRequest:
    """A request whose prompt has been read, between two decode steps. Decodes as ``Engine.resume`` does.

    The constructor prefills the prompt; errors as those of ``Engine.open``.
    """

    def __init__(self, engine: Engine, handle: RequestHandle) -> None:
        request = handle.request
        self._queue_seconds = time.perf_counter() - handle.created
        self.handle = handle
        prompt: Sequence[ScoredToken] = ()
        if request.prompt_scored:
            self.session, prompt = prefill_with_logprobs(engine.open, request, engine.encoder.token_bytes)
        else:
            self.session = engine.open(request.layout, request.mitigation, request.sampling.max_tokens, request.salt)
        self.writer = AnswerWriter(engine.encoder, self.session, request, prompt, handle.json_text)

    def accept(self, token: int, log_probs: Tensor) -> bool:
        """Deliver the text of a token that was chosen from ``log_probs``; return whether the answer goes on."""
        writer = self.writer
        if (chunk := writer.accept(token, log_probs)).text:
            self.handle.put(chunk)
        if writer.done:
            last = writer.end()
            generation = collect_stream([last])
            timings = {"queue": self._queue_seconds, **generation.timings}
            self.handle.put(replace(last, generation=replace(generation, timings=timings)))
        return not writer.done


_log = logging.getLogger(__name__)


def decode_step(running: Sequence[RunningRequest]) -> list[RunningRequest]:
    """Advance every answer by one token and return those that go on, in order.

    An answer that advances alone fails alone. What fails in the shared pass fails every answer in it: which of
    them were advanced is unknown.
    """
    shared = [request for request in running if request.session.can_share_pass]
    groups = [shared] if shared else []
    groups += [[request] for request in running if request not in shared]
    advanced = [request for group in groups if _advance(group) for request in group]
    return write_tokens([request for request in running if request in advanced])


def _advance(group: Sequence[RunningRequest]) -> bool:
    """Run one step of answers that share it; return whether it went well."""
    try:
        advance_batch([request.session for request in group], [request.writer.last for request in group])
    except Exception as error:
        _fail(group, error)
        return False
    return True


def write_tokens(running: Sequence[RunningRequest]) -> list[RunningRequest]:
    """Choose one token of each answer, all in one read from the device; return the answers that go on."""
    scored: list[tuple[RunningRequest, Tensor]] = []
    for request in running:
        try:
            scored.append((request, request.writer.next_log_probs()))
        except Exception as error:
            request.handle.fail(error)
    try:
        samplers = [request.writer.sampler for request, _ in scored]
        tokens = choose_together(samplers, [log_probs for _, log_probs in scored])
    except Exception as error:
        _fail([request for request, _ in scored], error)
        return []
    continuing = []
    for (request, log_probs), token in zip(scored, tokens, strict=True):
        try:
            if request.accept(token, log_probs):
                continuing.append(request)
        except Exception as error:
            request.handle.fail(error)
    return continuing


def _fail(group: Sequence[RunningRequest], error: Exception) -> None:
    """End the answers of a step that failed.

    Several get an error of their own each: an exception that several threads raise mixes their tracebacks.
    """
    if len(group) == 1:
        group[0].handle.fail(error)
        return
    _log.error("a step that %d answers shared failed: %s", len(group), type(error).__name__)
    for request in group:
        failure = GenerationError(
            f"a step that {len(group)} answers shared failed with {type(error).__name__}; ask again, and lower "
            "max_running if memory is short"
        )
        failure.__cause__ = error
        request.handle.fail(failure.with_traceback(error.__traceback__))


CLOSING_SECONDS = 60.0
"""How long ``close`` waits for the prompt or step that the model is at."""


class Worker:
    """Answers requests, first come first served. There is no thread before the first.

    Between two decode steps it prefills at most one prompt: running answers never wait for a whole queue of prompts,
    and a prompt never waits for a running answer to end while fewer than ``max_running`` are decoded.
    """

    def __init__(self, engine: Engine, max_running: int, on_step: Callable[[int], None] | None = None) -> None:
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


class BatchingGenerator(DelegatingGenerator["Engine"]):
    """Answers any number of requests, of any threads, in one thread of its own. Passages are read in the caller's.

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

    def __init__(self, engine: Engine, max_running: int = 8, on_step: Callable[[int], None] | None = None) -> None:
        if max_running < 1:
            raise ConfigError(f"max_running={max_running} must be >= 1")
        super().__init__(engine)
        self.capabilities = engine.capabilities - {"steps"}
        self._max_running = max_running
        self._on_step = on_step
        self._worker = Worker(engine, max_running, on_step)
        weakref.finalize(self, self._worker.stop)  # the thread holds the worker, and would outlive whoever forgets it

    @property
    def engine(self) -> Engine:
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

    def with_engine(self, engine: Engine) -> BatchingGenerator:
        """Return a generator of the same size over another engine; this one stays as it is."""
        return BatchingGenerator(engine, self._max_running, self._on_step)

    def generate(self, request: GenerationRequest) -> Generation:
        """Return the whole answer. Errors as those of ``stream``."""
        return collect_stream(self._chunks(RequestHandle(request)))

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer piece by piece; the last chunk carries the whole.

        Only the request is checked before the first piece is asked for. From then on the answer is computed at the
        model's pace, whether its pieces are read or not. Closing the iterator takes the answer out before the next
        step.

        Raises:
            RagPosfixError: those of ``Engine.open``, in this call.
            GenerationError: a step that several answers shared failed, or this generator was closed.
        """
        self._inner.plan(request.layout, request.mitigation, request.sampling.max_tokens)
        return self._chunks(RequestHandle(request))

    def stream_watched(
        self, request: GenerationRequest, check: Callable[[], None], released: Callable[[], None]
    ) -> Iterator[Chunk]:
        """As in ``Generator``; both functions must be quick. ``released`` is not called if the request is rejected."""
        yield from self._chunks(RequestHandle(request, check, released))

    def cached_segments(self, request: GenerationRequest) -> tuple[bool, ...]:
        return self._inner.cached_segments(request)

    def question_likelihood(self, layout: Layout, salt: str = "", *, bare: bool = False) -> tuple[float, ...]:
        return self._inner.question_likelihood(layout, salt, bare=bare)

    def first_token_log_probs(self, layout: Layout, tokens: Sequence[int], salt: str = "") -> list[tuple[float, ...]]:
        return self._inner.first_token_log_probs(layout, tokens, salt)

    def question_attention(
        self,
        layouts: Sequence[Layout],
        salt: str = "",
        check: Callable[[], None] | None = None,
        layers: Collection[int] | None = None,
        heads: Collection[tuple[int, int]] | None = None,
    ) -> list[tuple[tuple[float, ...], ...]]:
        return self._inner.question_attention(layouts, salt, check, layers, heads)

    def passage_attention(
        self, layouts: Sequence[Layout], salt: str = "", check: Callable[[], None] | None = None
    ) -> list[tuple[float, ...]]:
        return self._inner.passage_attention(layouts, salt, check)

    def projected_states(self, token_ids: Sequence[int], marked: Sequence[int]) -> list[tuple[float, ...]]:
        return self._inner.projected_states(token_ids, marked)

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


def batched(generator: Generator, max_running: int = 8, on_step: Callable[[int], None] | None = None) -> Generator:
    """Return ``generator`` with continuous batching; unchanged if it has it, or cannot be advanced step by step."""
    if "steps" not in generator.capabilities:
        return generator
    return BatchingGenerator(cast("Engine", generator), max_running, on_step)


def unbatched(generator: Generator) -> Generator:
    """Return the generator that ``generator`` batches, or ``generator``."""
    return generator.engine if isinstance(generator, BatchingGenerator) else generator
