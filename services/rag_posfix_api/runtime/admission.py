"""Admission: limits on running and waiting requests. Independent of HTTP and of models.

A *ticket* is one open request. A *queue slot* is the right to wait for the model, or for another request that computes
the same answer. A *permit* is the right to use the model. A cached answer needs a ticket only: it never waits for a
generation, and a full queue does not turn it away.

Permits are limited by number and by *tokens*: the tokens of the prompt and the maximum of the answer. The tokens of a
request are known exactly when it asks for a permit, because its prompt is assembled by then. Requests take permits in
the order of arrival: a long prompt waits until it fits, and no request overtakes it.

Generator, answer cache and precomputation with admission.

The generator runs with a permit only, and stops when the client has disconnected. Who waits for an equal question, or
computes its answer, has a queue slot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Generator as Generated
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rag_posfix.contracts.generator import DelegatingGenerator, Generator
from rag_posfix.contracts.request import Chunk, Generation, GenerationRequest
from rag_posfix.errors import GenerationCancelled, OverloadedError
from rag_posfix.pipeline.precompute import AnswerCache
from rag_posfix_api.http.errors import RequestError
from rag_posfix_api.http.metrics import ANSWER, Metrics

_HALF_LIFE_SECONDS = 60.0


@dataclass(eq=False, slots=True)
class Ticket:
    """One admitted request.

    Attributes:
        timeout: Time limit of the request in seconds.
        started: Time of admission, on the monotonic clock.
        cancelled: Whether the client has disconnected.
        stopped: Whether the service stops and cannot wait for the answer.
        queued_seconds: How long the request waited for its last permit.
        has_text: Whether the model has written text for the request.
        has_slot: Whether the request has a queue slot.
        tokens: What the request takes of the token limits, while it waits and works.
        tenant: The tenant that it comes from.
        model_seconds: Its share of the time in which the model worked.
    """

    timeout: float
    started: float
    cancelled: bool = False
    stopped: bool = False
    queued_seconds: float = 0.0
    has_text: bool = False
    has_slot: bool = False
    tokens: int = 0
    tenant: str = ""
    model_seconds: float = 0.0

    @property
    def remaining(self) -> float:
        """Seconds until the time limit."""
        return self.started + self.timeout - time.monotonic()

    def check(self) -> None:
        """Raise if the request must stop.

        Raises:
            GenerationCancelled: the client has disconnected.
            RequestError: the service stops, or the time limit is exceeded.
        """
        if self.stopped:
            raise RequestError("the service stopped before the answer was complete; ask again", code="stopping")
        if self.cancelled:
            raise GenerationCancelled("the client went away before the answer was complete")
        if self.remaining <= 0:
            raise RequestError(
                f"the answer took longer than request_timeout_seconds={self.timeout:g}; lower max_tokens, bring fewer "
                "documents, or raise the limit",
                code="timeout",
            )


TICKET: ContextVar[Ticket | None] = ContextVar("rag_posfix_service_ticket", default=None)
"""The ticket of the request that this thread works for."""


class WorkRate:
    """Tokens of finished requests for each second in which the model worked: the base of the header ``Retry-After``.

    A request counts with the tokens that it reserved, prompt and longest answer. The tokens that wait are counted in
    the same way, so that the quotient of both is a time. Formula: sum of tokens / sum of busy seconds, where both sums
    halve with every minute of work: a rate of an hour ago says little. Not safe for several threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens = 0.0
        self._busy_seconds = 0.0
        self._busy_since: float | None = None

    def begins(self) -> None:
        """Note that the model works from now on; it may do so already."""
        if self._busy_since is None:
            self._busy_since = self._clock()

    def finished(self, tokens: int, *, idle: bool) -> None:
        """Count a request that leaves the model; ``idle`` if no other request works."""
        current_time = self._clock()
        seconds = 0.0 if self._busy_since is None else current_time - self._busy_since
        decay = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
        self._tokens = self._tokens * decay + tokens
        self._busy_seconds = self._busy_seconds * decay + seconds
        self._busy_since = None if idle else current_time

    def seconds_for(self, tokens: float) -> float | None:
        """Return how long the model takes for ``tokens``; None before the first request has ended."""
        return tokens * self._busy_seconds / self._tokens if self._tokens > 0 else None


class Admission:
    """Hands out tickets, queue slots and permits. Safe to use from any thread.

    Args:
        max_queue: Number of queue slots beyond the permits.
        queue_timeout: Seconds that a ticket waits for a permit.
        max_open: Number of tickets; no limit if None.
        max_queued_tokens: Tokens of the tickets that wait for a permit; no limit if None.
        rate: Measures how fast permits are given back; a new one if None.
        on_release: Called with each ticket that gives back its permit, with its ``model_seconds``; must be quick.
    """

    def __init__(
        self,
        max_concurrent: int,
        max_queue: int,
        queue_timeout: float,
        max_open: int | None = None,
        max_queued_tokens: int | None = None,
        rate: WorkRate | None = None,
        on_release: Callable[[Ticket], None] = lambda _: None,
    ) -> None:
        self.capacity = max_concurrent + max_queue
        self._max_open = max_open
        self._max_tokens: int | None = None
        self._max_queued_tokens = max_queued_tokens
        self._rate = rate or WorkRate()
        self._on_release = on_release
        self._shared_at = 0.0
        self._max_concurrent = max_concurrent
        self._queue_timeout = queue_timeout
        self._changed = threading.Condition()
        self._open: dict[Ticket, None] = {}  # in the order of admission
        self._slots = 0
        self._working: set[Ticket] = set()
        self._waiting: deque[Ticket] = deque()

    @property
    def in_flight(self) -> int:
        """Number of tickets in use."""
        return len(self._open)

    @property
    def oldest_seconds(self) -> float:
        """Age of the oldest open request in seconds; 0 if none is open."""
        with self._changed:
            oldest = next(iter(self._open), None)
        return 0.0 if oldest is None else time.monotonic() - oldest.started

    @property
    def working(self) -> int:
        """Number of permits in use."""
        return len(self._working)

    @property
    def waiting(self) -> int:
        """Number of tickets that wait for a permit."""
        return len(self._waiting)

    @property
    def working_tokens(self) -> int:
        """Tokens of the tickets that have a permit."""
        return sum(ticket.tokens for ticket in self._working)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the tickets that wait for a permit."""
        return sum(ticket.tokens for ticket in self._waiting)

    def limit_tokens(self, max_tokens: int) -> None:
        """Set how many tokens all permits together may have. Without a limit only their number counts."""
        with self._changed:
            self._max_tokens = max_tokens
            self._changed.notify_all()

    @contextmanager
    def admit(self, timeout: float) -> Iterator[Ticket]:
        """Hold a ticket during the block; its queue slot and its permit are released at the end too.

        Raises:
            OverloadedError: all tickets are in use.
        """
        ticket = Ticket(timeout, time.monotonic())
        with self._changed:
            if self._max_open is not None and len(self._open) >= self._max_open:
                raise OverloadedError(
                    f"{len(self._open)} requests are open and {self._max_open} are allowed; try again later"
                )
            self._open[ticket] = None
        try:
            yield ticket
        finally:
            with self._changed:
                self._end_work(ticket)
                self._slots -= ticket.has_slot
                ticket.has_slot = False
                del self._open[ticket]
                self._changed.notify_all()

    def take_slot(self, ticket: Ticket) -> None:
        """Give the ticket a queue slot, until its request ends; it may have one already.

        Raises:
            OverloadedError: all queue slots are taken.
        """
        with self._changed:
            if ticket.has_slot:
                return
            if self._slots >= self.capacity:
                raise OverloadedError(
                    f"{self._slots} requests are being answered or waiting and {self.capacity} are allowed; "
                    "try again later",
                    self._rate.seconds_for((self.working_tokens + self.waiting_tokens) / max(self._slots, 1)),
                )
            ticket.has_slot = True
            self._slots += 1

    def acquire(self, ticket: Ticket, tokens: int = 1) -> None:
        """Wait for a permit in a queue slot, first come first served. Blocks the calling thread.

        Args:
            tokens: Tokens of the prompt and of the longest answer. Where requests have none, each counts as 1.

        Raises:
            RequestError: the request has more tokens than all permits together may have, or exceeds its time limit.
            OverloadedError: all queue slots are taken, too many tokens wait, or no permit was free within the queue
                timeout.
            GenerationCancelled: the client has disconnected.
        """
        ticket.queued_seconds = 0.0
        if self._max_tokens is not None and tokens > self._max_tokens:
            raise RequestError(
                f"prompt and answer take {tokens} tokens, at most max_tokens_in_flight={self._max_tokens} are "
                "allowed; lower max_tokens or bring fewer documents",
                code="token_limit_exceeded",
            )
        self.take_slot(ticket)
        started = time.monotonic()
        timeout = min(self._queue_timeout, max(ticket.remaining, 0.0))
        with self._changed:
            self._join_queue(ticket, tokens)
            try:
                is_free = self._changed.wait_for(
                    lambda: ticket.cancelled or ticket.stopped or self._is_next(ticket), timeout
                )
                waiting_tokens = self.waiting_tokens
            finally:
                self._waiting.remove(ticket)
                ticket.queued_seconds = time.monotonic() - started
                self._changed.notify_all()
            ticket.check()
            if not is_free:
                raise OverloadedError(
                    f"the model did not come free within queue_timeout_seconds={self._queue_timeout:g}; "
                    "try again later",
                    self._rate.seconds_for(waiting_tokens),
                )
            self._rate.begins()
            self._share_time()
            self._working.add(ticket)

    def release(self, ticket: Ticket) -> None:
        """Release the permit of the ticket, if it has one."""
        with self._changed:
            self._end_work(ticket)
            self._changed.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Mark the ticket's client as disconnected: the ticket stops waiting, and its work stops at the next step."""
        with self._changed:
            ticket.cancelled = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End every open request at its next step, with an error that says that the service stops."""
        with self._changed:
            for ticket in self._open:
                ticket.stopped = True
            self._changed.notify_all()

    def _join_queue(self, ticket: Ticket, tokens: int) -> None:
        """Put the ticket at the end of the queue, unless too many tokens wait there; who need not wait is let in."""
        ticket.tokens = tokens
        self._waiting.append(ticket)
        queued, max_queued = self.waiting_tokens, self._max_queued_tokens
        if max_queued is not None and queued > max_queued and not self._is_next(ticket):
            self._waiting.pop()
            raise OverloadedError(
                f"{queued - tokens} tokens wait for the model and this request has {tokens}; at most "
                f"max_queued_tokens={max_queued} may wait; try again later, or bring fewer documents",
                self._rate.seconds_for(queued - max_queued),
            )

    def _is_next(self, ticket: Ticket) -> bool:
        if len(self._working) >= self._max_concurrent or self._waiting[0] is not ticket:
            return False
        return self._max_tokens is None or self.working_tokens + ticket.tokens <= self._max_tokens

    def _end_work(self, ticket: Ticket) -> None:
        if ticket in self._working:
            self._share_time()
            self._working.discard(ticket)
            self._on_release(ticket)
            ticket.model_seconds = 0.0
            self._rate.finished(ticket.tokens, idle=not self._working)

    def _share_time(self) -> None:
        """Give the time since the last change to the tickets that have worked since, in equal shares."""
        current_time = time.monotonic()
        for ticket in self._working:
            ticket.model_seconds += (current_time - self._shared_at) / len(self._working)
        self._shared_at = current_time


class AdmittedGenerator(DelegatingGenerator[Generator]):
    """Takes a permit for each answer of another generator.

    Whole answers are generated as streams too, so that they can be stopped between two steps. A generator that
    computes ahead of its readers checks the ticket itself, and releases the permit when its computation is done.
    ``metrics`` count the first token of each request, and the further tokens and the waiting of each answer.
    """

    def __init__(self, generator: Generator, admission: Admission, metrics: Metrics | None = None) -> None:
        super().__init__(generator)
        self._admission = admission
        self._metrics = metrics

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer in pieces. The permit is released when the stream ends, fails or is closed, or earlier."""
        ticket = TICKET.get()
        if ticket is None:  # a question of this process itself, such as the one that warms the model
            yield from self._inner.stream(request)
        elif self._metrics is None:
            yield from self._admit(request, ticket)
        else:
            yield from _measure(self._admit(request, ticket), ticket, self._metrics)

    def _admit(self, request: GenerationRequest, ticket: Ticket) -> Generated[Chunk, None, None]:
        self._admission.acquire(ticket, len(request.layout.token_ids) + request.sampling.max_tokens)
        stream = self._inner.stream_watched(request, ticket.check, partial(self._admission.release, ticket))
        try:
            for chunk in stream:
                if chunk.generation is None:
                    ticket.check()
                    yield chunk
                else:
                    timings = chunk.generation.timings
                    timings = {**timings, "queue": ticket.queued_seconds + timings.get("queue", 0.0)}
                    yield replace(chunk, generation=replace(chunk.generation, timings=timings))
        finally:
            if isinstance(stream, Generated):  # other iterators have no ``close``
                stream.close()
            self._admission.release(ticket)


def _measure(chunks: Generated[Chunk, None, None], ticket: Ticket, metrics: Metrics) -> Iterator[Chunk]:
    generation: Generation | None = None
    try:
        for chunk in chunks:
            generation = chunk.generation
            if not ticket.has_text and (chunk.text or generation is not None):
                ticket.has_text = True
                metrics.first_token.observe(time.monotonic() - ticket.started)
            if generation is not None:
                tokens_after_first = generation.usage.completion_tokens - 1
                # From the generator's clock: waiting for a slow client is not the model's work.
                seconds = generation.timings.get("decode")
                if tokens_after_first > 0 and seconds is not None:
                    metrics.output_token.observe(seconds / tokens_after_first)
            yield chunk
    finally:
        chunks.close()
        metrics.count_wait(ANSWER, ticket.queued_seconds if generation is None else generation.timings["queue"])


class AdmittedCache:
    """An answer cache whose ``single_flight`` takes a queue slot: the slots are for requests that wait."""

    def __init__(self, cache: AnswerCache, admission: Admission) -> None:
        self._cache = cache
        self._admission = admission

    def get(self, key: str) -> Mapping[str, Any] | None:
        return self._cache.get(key)

    def begin(self) -> object:
        return self._cache.begin()

    def put(self, key: str, value: Mapping[str, Any], document_ids: Sequence[str] = ()) -> None:
        self._cache.put(key, value, document_ids)

    @contextmanager
    def single_flight(self, key: str) -> Iterator[bool | None]:
        """Hold while computing ``key``, in a queue slot.

        Raises:
            OverloadedError: all queue slots are taken.
        """
        if (ticket := TICKET.get()) is not None:
            self._admission.take_slot(ticket)
        with self._cache.single_flight(key) as again:
            yield again

    def drop_documents(self, document_ids: Sequence[str]) -> int:
        return self._cache.drop_documents(document_ids)

    @property
    def pending_deletions(self) -> int:
        return int(getattr(self._cache, "pending_deletions", 0))

    def close(self) -> None:
        self._cache.close()
