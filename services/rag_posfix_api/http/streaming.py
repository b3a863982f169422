"""A streamed answer as server-sent events of any dialect. The computation stops when the client disconnects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Protocol, TypeVar

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rag_posfix.contracts.answer import Answer, AnswerChunk
from rag_posfix.errors import GenerationCancelled
from rag_posfix_api.http.errors import Problem, kind_of, problem_of
from rag_posfix_api.http.facts import Facts

SERVER_SENT_EVENTS = "text/event-stream"

T = TypeVar("T")


class EventRenderer(Protocol):
    """Renders the server-sent events of one response in one dialect; each part is bytes that end an event."""

    def opening(self) -> Iterable[bytes]:
        """Return the events before the answer; none if the format has none."""
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


class StepRunner(Protocol):
    """Runs the steps of one answer in worker threads (``runtime.jobs.Job``)."""

    async def call(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns."""
        ...

    async def close(self, iterator: Iterator[object]) -> None:
        """Close an iterator in the worker threads that run its steps."""
        ...

    async def until_gone(self, receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``, or stop it when the client disconnects."""
        ...


class AnswerStream(Response):
    """The response to a streaming request.

    ``open`` must be called first: an error before the first piece is an ordinary HTTP error.

    Args:
        facts: Log fields; the code of an error is set.
        finished: Called with the complete answer.
        on_close: Closed after the response, also after an error.
    """

    def __init__(
        self,
        job: StepRunner,
        renderer: EventRenderer,
        facts: Facts,
        finished: Callable[[Answer], None],
        on_close: ExitStack,
        media_type: str = SERVER_SENT_EVENTS,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._job = job
        self._renderer = renderer
        self._facts = facts
        self._finished = finished
        self._on_close = on_close
        self._chunks: Iterator[AnswerChunk] = iter(())
        self._first: AnswerChunk | None = None

    async def open(self, start: Callable[[], Iterator[AnswerChunk]], receive: Receive) -> None:
        """Compute the first piece of the iterator that ``start`` returns. Raises any error until then."""

        async def first() -> AnswerChunk | None:
            self._chunks = await self._job.call(start)
            return await self._next()

        try:
            self._first = await self._job.until_gone(receive, first)
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await self._job.until_gone(receive, partial(self._send, send))
        except GenerationCancelled as error:
            self._facts.error = kind_of(error).code
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._events():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        for part in self._renderer.opening():
            yield part
        chunk = self._first
        try:
            while chunk is not None:
                for part in self._renderer.piece(chunk):
                    yield part
                if chunk.answer is not None:
                    self._finished(chunk.answer)
                chunk = await self._next()
        except Exception as error:  # the status is sent; the client learns of it in the stream
            self._facts.error = kind_of(error).code
            for part in self._renderer.failure(problem_of(error)):
                yield part
            return
        for part in self._renderer.closing():
            yield part

    async def _next(self) -> AnswerChunk | None:
        return await self._job.call(lambda: next(self._chunks, None))

    async def _close(self) -> None:
        try:
            with anyio.CancelScope(shield=True):
                await self._job.close(self._chunks)
        finally:
            self._on_close.close()
