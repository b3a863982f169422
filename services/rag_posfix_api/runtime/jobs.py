"""Runs the synchronous pipeline for the event loop: one job per request, always in worker threads.

A job's steps run one after another and share one context, so what a step sets in a ``ContextVar`` the next one sees,
whichever thread it runs in. Cancelling never abandons a running step: the permit stays taken until the model is free.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.types import Receive

from rag_posfix.errors import GenerationCancelled
from rag_posfix_api.runtime.admission import Admission, Ticket
from rag_posfix_api.runtime.admitted import TICKET

__all__ = ["Job", "Jobs"]

T = TypeVar("T")


class Job:
    """The work for one request.

    Args:
        ticket: The request's ticket.
        admission: Where it came from.
        limiter: Bounds the worker threads.
    """

    def __init__(self, ticket: Ticket, admission: Admission, limiter: anyio.CapacityLimiter) -> None:
        self.ticket = ticket
        self._admission = admission
        self._limiter = limiter
        self._context = contextvars.copy_context()
        self._context.run(TICKET.set, ticket)

    async def call(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns, run in a worker thread."""
        return await anyio.to_thread.run_sync(self._context.run, function, limiter=self._limiter)

    async def permitted(self, function: Callable[[], T]) -> T:
        """As ``call``, with a permit held meanwhile."""

        def work() -> T:
            self._admission.acquire(self.ticket)
            try:
                return function()
            finally:
                self._admission.release(self.ticket)

        return await self.call(work)

    async def close(self, iterator: Iterator[object]) -> None:
        """Close an iterator as its steps were run, also when the request is being cancelled."""
        if isinstance(iterator, Generator):
            with anyio.CancelScope(shield=True):
                await self.call(iterator.close)

    async def until_gone(self, receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
        """Return what ``work`` returns, or stop it as soon as the client goes away.

        Args:
            receive: Tells of the client, once the body of the request is read.
            work: What to do.

        Raises:
            GenerationCancelled: the client went away.
        """
        outcome: list[T] = []
        failure: list[Exception] = []
        async with anyio.create_task_group() as group:
            group.start_soon(self._cancel_when_gone, receive, group.cancel_scope)
            try:
                outcome.append(await work())
            except Exception as error:  # raised below: a task group would wrap it
                failure.append(error)
            group.cancel_scope.cancel()
        if failure:
            raise failure.pop()
        if not outcome:
            raise GenerationCancelled("the client went away before the answer was complete")
        return outcome.pop()

    async def _cancel_when_gone(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._admission.cancel(self.ticket)
        scope.cancel()


class Jobs:
    """Opens jobs under one admission.

    Args:
        admission: Bounds them.
        timeout: Seconds that one may take.
    """

    def __init__(self, admission: Admission, timeout: float) -> None:
        self.admission = admission
        self._timeout = timeout
        self._limiter = anyio.CapacityLimiter(admission.capacity)

    @contextmanager
    def open(self) -> Iterator[Job]:
        """Hold a job.

        Raises:
            OverloadedError: there is no room for one more.
        """
        with self.admission.admit(self._timeout) as ticket:
            yield Job(ticket, self.admission, self._limiter)
