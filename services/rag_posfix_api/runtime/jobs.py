"""Runs the synchronous pipeline in worker threads for the event loop, with one job per request.

The steps of a job run one after another with one context, so a ``ContextVar`` that a step sets is visible in the next
step, in any thread. Cancelling never abandons a running step: the permit is in use until the model is free.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.types import Receive

from rag_posfix.cancellation import set_cancel_check
from rag_posfix_api.runtime.admission import Admission, Ticket
from rag_posfix_api.runtime.admitted import TICKET

T = TypeVar("T")

_FREE_THREADS = 8
"""Threads for requests that do not wait for the model: retrieval, assembly, cached answers."""


class Job:
    """The execution of one admitted request.

    Args:
        admission: The admission that handed out the ticket.
        limiter: Limits the number of worker threads.
        queued: Called with the seconds that ``permitted`` waited for its permit, whether or not it got it.
    """

    def __init__(
        self,
        ticket: Ticket,
        admission: Admission,
        limiter: anyio.CapacityLimiter,
        queued: Callable[[float], None],
    ) -> None:
        self.ticket = ticket
        self._admission = admission
        self._limiter = limiter
        self._queued = queued
        self._context = contextvars.copy_context()
        self._context.run(TICKET.set, ticket)
        self._context.run(set_cancel_check, ticket.check)

    async def call(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``, run in a worker thread."""
        return await anyio.to_thread.run_sync(self._context.run, function, limiter=self._limiter)

    async def permitted(self, function: Callable[[], T]) -> T:
        """Do what ``call`` does while holding a permit."""

        def work() -> T:
            try:
                self._admission.acquire(self.ticket)
            finally:
                self._queued(self.ticket.queued_seconds)
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

    async def until_gone(self, receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``, or stop it at its next step when the client disconnects.

        Args:
            receive: Returns the ASGI events of the client after the body of the request.

        Raises:
            GenerationCancelled: the client has disconnected.
        """
        # A plain task: a task group with its cancel scope would cost a fifth of a cached answer.
        watcher = asyncio.ensure_future(self._cancel_when_gone(receive))
        try:
            return await work()
        finally:
            watcher.cancel()

    async def _cancel_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._admission.cancel(self.ticket)  # the work ends itself, at its next step


class Jobs:
    """Creates jobs with tickets of one admission.

    Args:
        timeout: Time limit of a job in seconds.
        queued: Called with the seconds that a job waited for a permit.
    """

    def __init__(self, admission: Admission, timeout: float, queued: Callable[[float], None]) -> None:
        self.admission = admission
        self._timeout = timeout
        self._queued = queued
        # Every place may block a thread. The others stay free for what waits for nobody.
        self._limiter = anyio.CapacityLimiter(admission.capacity + _FREE_THREADS)

    @contextmanager
    def open(self) -> Iterator[Job]:
        """Admit a request and hold its job during the block.

        Raises:
            OverloadedError: too many requests are running and waiting.
        """
        with self.admission.admit(self._timeout) as ticket:
            yield Job(ticket, self.admission, self._limiter, self._queued)
