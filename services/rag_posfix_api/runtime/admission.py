"""Admission: limits on running and waiting requests. Independent of HTTP and of models.

A *ticket* is one admitted request. A *permit* is the right to use the model. Steps before the model (retrieval, the
answer cache) need a ticket only, so a cached answer never waits for a generation.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rag_posfix.errors import GenerationCancelled, OverloadedError
from rag_posfix_api.http.errors import RequestTimeoutError

__all__ = ["Admission", "Ticket"]


@dataclass(eq=False, slots=True)
class Ticket:
    """One admitted request.

    Attributes:
        timeout: Time limit of the request in seconds.
        started: Time of admission, on the monotonic clock.
        cancelled: Whether the client has disconnected.
        queued_seconds: How long the request waited for a permit.
    """

    timeout: float
    started: float
    cancelled: bool = False
    queued_seconds: float = 0.0

    @property
    def remaining(self) -> float:
        """Seconds until the time limit."""
        return self.started + self.timeout - time.monotonic()

    def check(self) -> None:
        """Raise if the request must stop.

        Raises:
            GenerationCancelled: the client has disconnected.
            RequestTimeoutError: the time limit is exceeded.
        """
        if self.cancelled:
            raise GenerationCancelled("the client went away before the answer was complete")
        if self.remaining <= 0:
            raise RequestTimeoutError(
                f"the answer took longer than request_timeout_seconds={self.timeout:g}; lower max_tokens, bring fewer "
                "documents, or raise the limit"
            )


class Admission:
    """Hands out tickets and permits. Safe to use from any thread.

    Args:
        max_concurrent: Number of permits.
        max_queue: Number of tickets beyond the permits.
        queue_timeout: Seconds that a ticket waits for a permit.
    """

    def __init__(self, max_concurrent: int, max_queue: int, queue_timeout: float) -> None:
        self.capacity = max_concurrent + max_queue
        self._max_concurrent = max_concurrent
        self._queue_timeout = queue_timeout
        self._changed = threading.Condition()
        self._tickets = 0
        self._working: set[Ticket] = set()
        self._waiting: deque[Ticket] = deque()

    @property
    def in_flight(self) -> int:
        """Number of tickets in use."""
        return self._tickets

    @property
    def working(self) -> int:
        """Number of permits in use."""
        return len(self._working)

    @property
    def waiting(self) -> int:
        """Tickets that wait for a permit."""
        return len(self._waiting)

    @contextmanager
    def admit(self, timeout: float) -> Iterator[Ticket]:
        """Hold a ticket during the block; its permit is released at the end too.

        Raises:
            OverloadedError: all tickets are in use.
        """
        with self._changed:
            if self._tickets >= self.capacity:
                raise OverloadedError(
                    f"{self._tickets} requests are being answered or waiting and {self.capacity} are allowed; "
                    "try again later"
                )
            self._tickets += 1
        ticket = Ticket(timeout, time.monotonic())
        try:
            yield ticket
        finally:
            self.release(ticket)
            with self._changed:
                self._tickets -= 1

    def acquire(self, ticket: Ticket) -> None:
        """Wait for a permit, first come first served. Blocks the calling thread.

        Raises:
            OverloadedError: no permit was free within the queue timeout.
            GenerationCancelled: the client has disconnected.
            RequestTimeoutError: the time limit of the request is exceeded.
        """
        started = time.monotonic()
        patience = min(self._queue_timeout, max(ticket.remaining, 0.0))
        with self._changed:
            self._waiting.append(ticket)
            try:
                free = self._changed.wait_for(lambda: ticket.cancelled or self._is_next(ticket), patience)
            finally:
                self._waiting.remove(ticket)
                ticket.queued_seconds += time.monotonic() - started
                self._changed.notify_all()
            ticket.check()
            if not free:
                raise OverloadedError(
                    f"the model did not come free within queue_timeout_seconds={self._queue_timeout:g}; "
                    "try again later"
                )
            self._working.add(ticket)

    def release(self, ticket: Ticket) -> None:
        """Release the permit of the ticket, if it has one."""
        with self._changed:
            self._working.discard(ticket)
            self._changed.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Mark the ticket's client as disconnected: the ticket stops waiting, and its work stops at the next step."""
        with self._changed:
            ticket.cancelled = True
            self._changed.notify_all()

    def _is_next(self, ticket: Ticket) -> bool:
        return len(self._working) < self._max_concurrent and self._waiting[0] is ticket
