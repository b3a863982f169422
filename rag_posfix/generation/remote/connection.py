"""HTTP to a server: an event loop in a thread of its own, one task per answer, which is cancelled when nobody waits.

A task holds its connection in a ``with`` block, so that cancelling closes it, also while the server is still reading
the prompt. A blocking client could only be stopped between two pieces of an answer.
"""

from __future__ import annotations

import json
import logging
import random
import re
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from rag_posfix.errors import (
    ConfigError,
    GenerationError,
    OverloadedError,
    PromptTooLongError,
    UpstreamError,
    UpstreamTimeoutError,
    missing_extra,
)

if TYPE_CHECKING:
    import httpx2
    from anyio.from_thread import BlockingPortal

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""How often a waiting caller asks whether the answer is still wanted."""
LONGEST_PAUSE_SECONDS = 10.0
"""The longest pause before another attempt, whatever ``Retry-After`` says."""
_FIRST_PAUSE_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_ERROR_BYTES = 16 * 1024
_BASE_BYTES = 1024 * 1024
_BYTES_PER_TOKEN = 4096
"""An event of one token takes about 300 bytes, more with log-probabilities; a server that sends more is stopped."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """How long a server may take, and how often it is asked.

    Attributes:
        connect_seconds: Time limit for opening a connection.
        read_seconds: How long the server may be silent: before the first token, and between two pieces of an answer.
        retries: Further attempts after status 429 or 503 or a failed connection, before any part of an answer came.
    """

    connect_seconds: float = 10.0
    read_seconds: float = 120.0
    retries: int = 2

    def __post_init__(self) -> None:
        if self.connect_seconds <= 0 or self.read_seconds <= 0 or self.retries < 0:
            raise ConfigError(f"time limits must be above 0 and retries at least 0, got {self}")


class Connection:
    """Connections to one server. Safe to share between threads.

    Args:
        api_key: Sent as ``Authorization: Bearer``; None sends none. It is in no message and no log.
        check_cancelled: Called while an answer is awaited; what it raises ends the request and is raised there.

    Raises:
        ConfigError: httpx2 is not installed.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        limits: ServerLimits | None = None,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> None:
        self._url = url
        self._limits = limits or ServerLimits()
        self._check_cancelled = check_cancelled
        self._client = _client(api_key, self._limits)
        self._opened = ExitStack()
        self._portal = _portal(self._opened)
        self._opened.callback(_close_client, self._portal, self._client)
        weakref.finalize(self, self._opened.close)  # the thread would outlive whoever forgets to close

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return self._url

    def close(self) -> None:
        """Close all connections; running answers end with an error."""
        self._opened.close()

    def post(self, route: str, body: Mapping[str, Any], max_tokens: int) -> Generator[Mapping[str, Any], None, None]:
        """Send a request and yield the JSON objects of its answer: one, or with ``stream`` one for each event.

        Nothing is sent before the first object is asked for. Closing the iterator closes the connection.

        Args:
            route: Path below the base URL.
            body: The JSON body; ``stream`` in it says which kind of answer is expected.
            max_tokens: Tokens of the answer, which bound its size in bytes.

        Raises:
            UpstreamTimeoutError: the server was silent for longer than ``read_seconds``.
            UpstreamError: the connection failed or was cut, or the answer is not what the API promises.
            OverloadedError: the server has no capacity (429), also after the retries.
            PromptTooLongError: the server says that the prompt exceeds its context window.
        """
        received: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        most_bytes = _BASE_BYTES + _BYTES_PER_TOKEN * max_tokens
        exchange = _Exchange(self._client, self._url, route, body, self._limits, most_bytes, received.put)
        try:
            task: Future[None] = self._portal.start_task_soon(exchange.run)
        except RuntimeError as error:
            raise GenerationError(f"the connection to {self._url} was closed; make another generator") from error
        task.add_done_callback(lambda _: received.put(None))  # wakes whoever waits
        try:
            while (found := self._next(received)) is not None:
                yield found
            task.result()
        finally:
            task.cancel()
            wait([task], timeout=_CLOSE_SECONDS)

    def _next(self, received: SimpleQueue[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        while True:
            self._check_cancelled()
            try:
                return received.get(timeout=POLL_SECONDS)
            except Empty:
                continue


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request and its answer, in the event loop."""

    client: httpx2.AsyncClient
    url: str
    route: str
    body: Mapping[str, Any]
    limits: ServerLimits
    most_bytes: int
    emit: Callable[[Mapping[str, Any]], None] = field(repr=False)

    async def run(self) -> None:
        """Ask until there is an answer or no retry is left, and emit the objects of the answer."""
        import anyio
        import httpx2

        for attempt in range(self.limits.retries + 1):
            try:
                pause = await self._attempt(last=attempt == self.limits.retries)
            except httpx2.TimeoutException as error:
                _log.warning("the server at %s was silent for too long", self.url)
                raise UpstreamTimeoutError(
                    f"{self.url} was silent for {self.limits.read_seconds:g} s; raise "
                    "RAG_POSFIX_REMOTE_TIMEOUT_SECONDS, or use fewer passages"
                ) from error
            except httpx2.SSEError as error:
                raise UpstreamError(f"{self.url} sent no stream of events: {error}") from error
            except (httpx2.HTTPError, httpx2.StreamError) as error:
                raise UpstreamError(
                    f"the connection to {self.url} failed in the middle of an answer ({type(error).__name__})"
                ) from error
            if pause is None:
                return
            backoff = _FIRST_PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.0)
            await anyio.sleep(min(max(pause, backoff), LONGEST_PAUSE_SECONDS))

    async def _attempt(self, *, last: bool) -> float | None:
        """Emit the answer and return None, or return the seconds to wait before another attempt."""
        import httpx2

        async with AsyncExitStack() as opened:
            try:
                response = await opened.enter_async_context(self._request())
            except (httpx2.ReadTimeout, httpx2.WriteTimeout):
                raise  # the server may be at work: asking again would double it
            except httpx2.TransportError as error:
                _log.warning("the server at %s cannot be reached (%s)", self.url, type(error).__name__)
                if not last:
                    return 0.0
                raise UpstreamError(
                    f"{self.url} cannot be reached ({type(error).__name__}); check the URL, and that the server runs"
                ) from error
            if response.status_code in RETRIED and not last:
                return _retry_after(response.headers.get("retry-after", ""))
            if response.status_code != 200:
                told = await _beginning(response, _ERROR_BYTES)
                _log.warning("the server at %s answered with status %d", self.url, response.status_code)
                raise failure_of_status(self.url, response.status_code, told)
            objects = self._events(response) if self.body.get("stream") else self._whole(response)
            async for found in objects:
                self.emit(found)
        return None

    def _request(self) -> AbstractAsyncContextManager[httpx2.Response]:
        accept = "text/event-stream" if self.body.get("stream") else "application/json"
        return self.client.stream("POST", self.url + self.route, json=self.body, headers={"accept": accept})

    async def _whole(self, response: httpx2.Response) -> AsyncIterator[Mapping[str, Any]]:
        data = await _beginning(response, self.most_bytes + 1)
        if len(data) > self.most_bytes:
            raise self._too_large()
        yield self._object(data)

    async def _events(self, response: httpx2.Response) -> AsyncIterator[Mapping[str, Any]]:
        import httpx2

        size = 0
        async for event in httpx2.EventSource(response, self.most_bytes):
            size += len(event.data)
            if size > self.most_bytes:
                raise self._too_large()
            if event.data == "[DONE]":
                return
            if event.data:
                yield self._object(event.data)

    def _object(self, data: str | bytes) -> Mapping[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UpstreamError(
                f"{self.url} sent an answer that is no JSON object; is it an OpenAI-compatible server?"
            )
        return found

    def _too_large(self) -> UpstreamError:
        return UpstreamError(f"{self.url} sent more than {self.most_bytes} bytes, too much for the tokens asked for")


async def _beginning(response: httpx2.Response, most: int) -> bytes:
    """Return the body, or its first ``most`` bytes."""
    data = bytearray()
    async for part in response.aiter_bytes():
        data += part
        if len(data) >= most:
            break
    return bytes(data[:most])


def _retry_after(header: str) -> float:
    """Return the seconds of ``Retry-After``; 0 for none, and for a date, which clients may ignore."""
    try:
        seconds = float(header)
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < float("inf") else 0.0


def _client(api_key: str | None, limits: ServerLimits) -> httpx2.AsyncClient:
    try:
        import httpx2
    except ImportError as error:
        raise missing_extra("httpx2", "remote") from error
    return httpx2.AsyncClient(
        headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
        timeout=httpx2.Timeout(limits.read_seconds, connect=limits.connect_seconds),
        limits=httpx2.Limits(max_connections=None),  # the service bounds how many answers run
        follow_redirects=False,  # the key goes to the given server alone
    )


def _portal(opened: ExitStack) -> BlockingPortal:
    from anyio.from_thread import start_blocking_portal

    return opened.enter_context(start_blocking_portal(name="rag_posfix-remote"))


def _close_client(portal: BlockingPortal, client: httpx2.AsyncClient) -> None:
    portal.call(client.aclose)


RETRIED = frozenset({429, 503})
"""Statuses that say that the same request may succeed later."""

_SHOWN = 300
_TOO_LONG = re.compile(r"context[ _](length|window|size)|maximum context|too many tokens|n_ctx", re.IGNORECASE)
_ADVICE = {
    401: "; set RAG_POSFIX_REMOTE_API_KEY to a key of that server",
    403: "; set RAG_POSFIX_REMOTE_API_KEY to a key that may use this model",
    404: "; check the name of the model and the base URL in openai:NAME@URL",
}


def failure_of_status(server: str, status: int, body: bytes) -> GenerationError | OverloadedError | PromptTooLongError:
    """Return the error for a response that is not a success."""
    reason = _stated_reason(body)
    said = f"{server} answered with status {status}{f': {reason}' if reason else ''}"
    if status in (400, 413, 422) and _TOO_LONG.search(reason):
        return PromptTooLongError(
            "the prompt exceeds the context window of the remote generator; use fewer or shorter passages, and set "
            "RAG_POSFIX_REMOTE_CONTEXT_WINDOW to the server's limit, so that passages are left out in time"
        )
    if status == 429:
        return OverloadedError("the remote generator has no capacity now (status 429); try again later")
    if status in (408, 504):
        return UpstreamTimeoutError(f"{said}; try again later, or lower max_tokens")
    return UpstreamError(said + _ADVICE.get(status, ""))


def _stated_reason(body: bytes) -> str:
    """Return the message and the code that the body of an error states, on one line; empty if there are none."""
    try:
        told: Any = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return error_message(told) if isinstance(told, dict) else ""


def error_message(told: Mapping[str, Any]) -> str:
    """Return the message and the code of an error object, on one line; empty if there are none.

    Args:
        told: ``{"error": {"message", "code"}}``, ``{"error": text}``, ``{"message": text}`` or ``{"detail": text}``.
    """
    inner = told.get("error", told)
    if not isinstance(inner, dict):
        inner = {"message": inner}
    parts = [inner.get(name) for name in ("message", "detail", "code")]
    line = " ".join(" ".join(part for part in parts if isinstance(part, str))[: 4 * _SHOWN].split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."
