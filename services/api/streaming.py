"""A streamed answer as server-sent events. The computation stops when the client goes away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import partial

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rag_posfix.answer import Answer, AnswerChunk
from rag_posfix.errors import GenerationCancelled
from services.api.completions import Completion
from services.api.errors import error_body, kind_of
from services.api.facts import Facts
from services.api.jobs import Job
from services.api.responses import DONE, event

__all__ = ["AnswerStream"]


class AnswerStream(Response):
    """The response to a request that streams.

    ``open`` must have returned first: until then an error is an ordinary HTTP error.

    Args:
        job: Runs the steps.
        completion: Writes the chunks.
        facts: What to note on an error.
        finished: Called with the answer when it is complete.
        on_close: Closed when the response is over, however it ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self, job: Job, completion: Completion, facts: Facts, finished: Callable[[Answer], None], on_close: ExitStack
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._job = job
        self._completion = completion
        self._facts = facts
        self._finished = finished
        self._on_close = on_close
        self._chunks: Iterator[AnswerChunk] = iter(())
        self._first: AnswerChunk | None = None

    async def open(self, start: Callable[[], Iterator[AnswerChunk]], receive: Receive) -> None:
        """Compute the first piece of what ``start`` returns. Raises what goes wrong until then."""

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
        yield event(self._completion.opening())
        chunk = self._first
        try:
            while chunk is not None:
                for piece in self._completion.pieces(chunk):
                    yield event(piece)
                if chunk.answer is not None:
                    self._finished(chunk.answer)
                chunk = await self._next()
        except Exception as error:  # the status is sent; the client learns of it in the stream
            self._facts.error = kind_of(error).code
            yield event(error_body(error))
            return
        yield DONE

    async def _next(self) -> AnswerChunk | None:
        return await self._job.call(lambda: next(self._chunks, None))

    async def _close(self) -> None:
        try:
            with anyio.CancelScope(shield=True):
                await self._job.close(self._chunks)
        finally:
            self._on_close.close()
