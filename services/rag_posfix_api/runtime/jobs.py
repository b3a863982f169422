"""Runs the synchronous pipeline in worker threads for the event loop, with one job per request.

The steps of a job run one after another with one context, so a ``ContextVar`` that a step sets is visible in the next
step, in any thread. Cancelling never abandons a running step: the permit is in use until the model is free.

Precomputes the keys and values of collections in the background, one collection after the other.

Each batch of passages takes a permit like an answer does, so questions wait for one batch at most.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol, TypeVar

import anyio
import anyio.to_thread
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rag_posfix.cancellation import set_cancel_check
from rag_posfix.contracts.answer import Answer, AnswerChunk
from rag_posfix.errors import GenerationCancelled, OverloadedError, RagPosfixError
from rag_posfix_api.http.auth import CALLER
from rag_posfix_api.http.errors import Problem, RequestError, log_failure, problem_of, spec_of
from rag_posfix_api.http.metrics import LogFields
from rag_posfix_api.runtime.admission import TICKET, Admission, Ticket

T = TypeVar("T")

SERVER_SENT_EVENTS = "text/event-stream"
READING_SECONDS = 5.0
"""How long after its time limit a client may take to read what was computed within it."""
HEADERS_SECONDS = 1.0
"""How long the head of a stream waits for the first piece: an error until then has its own status."""
PULSE_SECONDS = 10.0
"""Time between two pulses of a stream without a piece. Proxies end connections that are silent for 60 s or less."""
_PULSES = {SERVER_SENT_EVENTS: b": waiting\n\n"}
"""What a reader passes over: a comment; before a line of JSON a blank."""

_FREE_THREADS = 8
"""Threads for requests that do not wait for the model: retrieval, assembly, cached answers."""


class Job:
    """The execution of one admitted request.

    Args:
        limiter: Limits the number of worker threads.
        count_wait: Called with the seconds that ``permitted`` waited for its permit, whether or not it got it.
    """

    def __init__(
        self,
        ticket: Ticket,
        admission: Admission,
        limiter: anyio.CapacityLimiter,
        count_wait: Callable[[float], None],
    ) -> None:
        self.ticket = ticket
        self._admission = admission
        self._limiter = limiter
        self._count_wait = count_wait
        self._context = contextvars.copy_context()
        self._context.run(TICKET.set, ticket)
        self._context.run(set_cancel_check, ticket.check, lambda: ticket.remaining)

    async def call(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``, run in a worker thread."""
        return await anyio.to_thread.run_sync(self._context.run, function, limiter=self._limiter)

    async def permitted(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``, run in a worker thread with a permit."""

        def work() -> T:
            try:
                self._admission.acquire(self.ticket)
            finally:
                self._count_wait(self.ticket.queued_seconds)
            try:
                return function()
            finally:
                self._admission.release(self.ticket)

        return await self.call(work)

    async def close(self, iterator: Iterator[object]) -> None:
        """Close an iterator in a worker thread, also while the request is being cancelled."""
        if isinstance(iterator, Generator):
            with anyio.CancelScope(shield=True):
                await self.call(iterator.close)

    async def cancel_on_disconnect(self, receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``, or stop it at its next step when the client disconnects.

        Args:
            receive: Returns the ASGI events of the client after the body of the request.

        Raises:
            GenerationCancelled: the client has disconnected.
        """

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._admission.cancel(self.ticket)  # the work ends itself, at its next step

        # A plain task: a task group with its cancel scope would cost a fifth of a cached answer.
        watcher = asyncio.ensure_future(watch())
        try:
            return await work()
        finally:
            watcher.cancel()


class Jobs:
    """Creates jobs with tickets of one admission.

    Args:
        timeout: Time limit of a job in seconds.
        count_wait: Called with the seconds that a job waited for a permit.
    """

    def __init__(self, admission: Admission, timeout: float, count_wait: Callable[[float], None]) -> None:
        self.admission = admission
        self._timeout = timeout
        self._count_wait = count_wait
        # Every queue slot may block a thread. The free ones are for requests that do not wait for the model.
        self._limiter = anyio.CapacityLimiter(admission.capacity + _FREE_THREADS)

    @contextmanager
    def open(self) -> Iterator[Job]:
        """Admit a request and hold its job during the block.

        Raises:
            OverloadedError: too many requests are running and waiting.
        """
        with self.admission.admit(self._timeout) as ticket:
            ticket.tenant = CALLER.get().tenant
            yield Job(ticket, self.admission, self._limiter, self._count_wait)

    def yield_to_waiters(self) -> None:
        """Let those work first who wait for a permit. For long work that runs with one, in its thread.

        Raises:
            OverloadedError: no permit was free again within the queue timeout.
            GenerationCancelled: the client has disconnected.
        """
        ticket = TICKET.get()
        if ticket is not None:
            ticket.check()
            if self.admission.waiting:
                self.admission.release(ticket)
                self.admission.acquire(ticket)

    async def run(self, receive: Receive, function: Callable[[], T], *, permit: bool = False) -> T:
        """Return the result of ``function``, run in a new job, with a permit or without.

        Raises:
            OverloadedError: too many requests are running and waiting.
            GenerationCancelled: the client has disconnected.
        """
        with self.open() as job:
            step = job.permitted if permit else job.call
            return await job.cancel_on_disconnect(receive, lambda: step(function))


class EventRenderer(Protocol):
    """Renders the server-sent events of one response in one dialect; each item is bytes that end an event."""

    def opening(self, first: AnswerChunk | None) -> Iterable[bytes]:
        """Return the events before the answer, whose first piece is ``first``; none if the format has none."""
        return ()

    def piece(self, chunk: AnswerChunk) -> Iterable[bytes]:
        """Return the events for a piece of the answer; the last piece has the complete answer."""
        ...

    def closing(self) -> Iterable[bytes]:
        """Return the events after a complete answer; none if the format has none."""
        return ()

    def failure(self, problem: Problem) -> Iterable[bytes]:
        """Return the events that end a stream whose answer failed."""
        ...


class AnswerStream(Response):
    """A streamed answer as events of any dialect; ``open`` must be called first.

    The work stops when the client disconnects.

    Args:
        job: Runs the steps; ``on_close`` ends it, after the response, also after an error.
        fields: The code of an error is set.
        record: Called with the complete answer.
    """

    def __init__(
        self,
        job: Job,
        on_close: ExitStack,
        renderer: EventRenderer,
        fields: LogFields,
        record: Callable[[Answer], None],
        media_type: str = SERVER_SENT_EVENTS,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._job = job
        self._on_close = on_close
        self._renderer = renderer
        self._fields = fields
        self._record = record
        self._pulse = _PULSES.get(media_type, b" ")
        self._chunks: Iterator[AnswerChunk] = iter(())
        self._next: asyncio.Future[AnswerChunk | None] = asyncio.get_running_loop().create_future()

    async def open(self, start: Callable[[], Iterator[AnswerChunk]], receive: Receive) -> None:
        """Begin to compute; return with the first piece of the iterator of ``start``, or after ``HEADERS_SECONDS``.

        An error until then is an ordinary HTTP error; a later one ends the stream.
        """

        async def first() -> AnswerChunk | None:
            self._chunks = await self._job.call(start)
            return await self._compute()

        self._next = asyncio.ensure_future(first())
        try:
            await self._job.cancel_on_disconnect(receive, lambda: asyncio.wait({self._next}, timeout=HEADERS_SECONDS))
            if self._next.done():
                self._next.result()
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await self._job.cancel_on_disconnect(receive, partial(self._send, send))
        except GenerationCancelled as error:
            self._fields.error = spec_of(error).code
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        async def deliver(
            message: Message,
        ) -> None:  # the steps end themselves: only what waits for the client is ended
            try:
                async with asyncio.timeout(max(self._job.ticket.remaining, 0.0) + READING_SECONDS):
                    await send(message)
            except TimeoutError as error:
                raise GenerationCancelled("the client did not read its answer within the time limit") from error

        await deliver({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events():
            await deliver({"type": "http.response.body", "body": event, "more_body": True})
        await deliver({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        opened = False
        timeout: float | None = PULSE_SECONDS
        written = time.monotonic()
        try:
            while True:
                while not (await asyncio.wait({self._next}, timeout=timeout))[0]:
                    yield self._pulse
                    written = time.monotonic()
                chunk = self._next.result()
                if not opened:
                    opened = True
                    for event in self._renderer.opening(chunk):
                        yield event
                if chunk is None:
                    break
                for event in self._renderer.piece(chunk):
                    yield event
                    written = time.monotonic()
                if chunk.answer is None and time.monotonic() - written >= PULSE_SECONDS:  # such as a call of a tool
                    yield self._pulse
                    written = time.monotonic()
                if chunk.answer is not None:
                    self._record(chunk.answer)
                    timeout = None  # a blank after the last line would be a line
                self._next = asyncio.ensure_future(self._compute())
        except Exception as error:  # the status is sent; the client learns of it in the stream
            self._fields.error = spec_of(error).code
            opening = () if opened else self._renderer.opening(None)
            for event in (*opening, *self._renderer.failure(problem_of(error))):
                yield event
            return
        for event in self._renderer.closing():
            yield event

    async def _compute(self) -> AnswerChunk | None:
        return await self._job.call(lambda: next(self._chunks, None))

    async def _close(self) -> None:
        try:
            with anyio.CancelScope(shield=True):
                if not self._next.done():  # a step that was begun ends, and then the iterator may be closed
                    await asyncio.wait({self._next})
                if not self._next.cancelled():
                    self._next.exception()  # else asyncio logs that nobody looked at it
                await self._job.close(self._chunks)
        finally:
            self._on_close.close()


Progress = Callable[[int, int], None]

_one_thread = partial(ThreadPoolExecutor, 1, thread_name_prefix="precompute")
_BATCH_SECONDS = 600.0
PAUSE_SECONDS = 0.5
"""How long a batch waits before it asks a full service again."""


@dataclass(frozen=True, slots=True)
class PrecomputeState:
    """How far a job is.

    Attributes:
        status: ``none`` before the first job, then ``queued``, ``running``, ``done``, ``cancelled`` or ``failed``.
        done: Documents whose keys and values are stored.
        documents: Documents that are to be read; 0 until they were counted.
        tokens: Tokens that had to be computed; known at the end.
        error: Why it failed.
    """

    status: Literal["none", "queued", "running", "done", "cancelled", "failed"] = "queued"
    done: int = 0
    documents: int = 0
    tokens: int | None = None
    error: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.status in ("done", "cancelled", "failed")


class PrecomputeJobs:
    """Jobs by key, one of them running at a time. The last state of each is kept."""

    def __init__(self) -> None:
        self._pool = _one_thread()
        self._lock = threading.Lock()
        self._states: dict[Hashable, PrecomputeState] = {}
        self._cancelled: dict[Hashable, threading.Event] = {}

    def start(self, key: Hashable, work: Callable[[Progress, threading.Event], int]) -> PrecomputeState:
        """Queue a job; raise ``RequestError`` while a job with this key has not ended.

        ``work`` gets a function for its progress and an event that says to end, and returns the number of tokens.
        """
        with self._lock:
            previous = self._states.get(key)
            if previous is not None and not previous.ended:
                raise RequestError(
                    "a job for this collection is running; wait until it ends, or cancel it", code="already_exists"
                )
            cancelled = self._cancelled[key] = threading.Event()
            state = self._states[key] = PrecomputeState()
            self._pool.submit(self._run, key, work, cancelled)
        return state

    def state(self, key: Hashable) -> PrecomputeState | None:
        """Return the state of the last job with this key, or None."""
        with self._lock:
            return self._states.get(key)

    def cancel(self, key: Hashable) -> PrecomputeState | None:
        """End a job after its current batch; return its state, or None if there was none."""
        with self._lock:
            state, cancelled = self._states.get(key), self._cancelled.get(key)
        if cancelled is not None:
            cancelled.set()
        return state

    def forget(self, key: Hashable) -> None:
        """End a job, and forget its state."""
        self.cancel(key)
        with self._lock:
            self._states.pop(key, None)

    def close(self) -> None:
        """End all jobs after their current batch, and wait for that; later jobs have a thread of their own."""
        with self._lock:
            pool, self._pool = self._pool, _one_thread()
            for event in self._cancelled.values():
                event.set()
        pool.shutdown()  # queued jobs run too, and note that they were cancelled

    def _run(
        self, key: Hashable, work: Callable[[Progress, threading.Event], int], cancelled: threading.Event
    ) -> None:
        def progress(done: int, documents: int) -> None:
            self._change(key, cancelled, done=done, documents=documents)
            if cancelled.is_set():
                raise GenerationCancelled("the job was cancelled")

        try:
            if cancelled.is_set():
                raise GenerationCancelled("the job was cancelled")
            self._change(key, cancelled, status="running")
            tokens = work(progress, cancelled)
            self._change(key, cancelled, status="done", tokens=tokens)
        except GenerationCancelled:
            self._change(key, cancelled, status="cancelled")
        except Exception as error:
            kind = spec_of(error)
            if not isinstance(error, RagPosfixError) or kind.status >= 500:
                log_failure(error)
            self._change(key, cancelled, status="failed", error=kind.message or " ".join(str(error).split()))

    def _change(self, key: Hashable, job: threading.Event, **fields: object) -> None:
        with self._lock:
            state = self._states.get(key)
            if state is not None and self._cancelled.get(key) is job:
                self._states[key] = replace(state, **fields)  # type: ignore[arg-type]


@contextmanager
def batch_permit(admission: Admission, cancelled: threading.Event, tenant: str = "") -> Iterator[None]:
    """Hold a permit for a batch of passages; while the service is full, ask again.

    Raises:
        GenerationCancelled: the job was cancelled, or the service stops.
    """
    while not cancelled.is_set():
        with ExitStack() as stack:
            try:
                ticket = stack.enter_context(admission.admit(_BATCH_SECONDS))
                ticket.tenant = tenant
                admission.acquire(ticket)
            except OverloadedError:
                pass
            else:
                yield
                return
        time.sleep(PAUSE_SECONDS)
    raise GenerationCancelled("the job was cancelled")
