"""HTTP to a server: an event loop in a thread of its own, one task per answer, cancelled with its caller.

A task holds its connection in a ``with`` block, so that cancelling closes it, also while the server is still reading
the prompt. A blocking client could only be stopped between two pieces of an answer. openai's client is not used: it
reads bodies and events of any size, repeats requests after errors that may leave a server at work, and sends headers
from ``OPENAI_*`` variables and of its platform to any server.
"""

from __future__ import annotations

import json
import logging
import random
import re
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from concurrent.futures import wait
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
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

_log = logging.getLogger(__name__)

Event = Mapping[str, Any]
"""One JSON object of an answer."""

POLL_SECONDS = 0.05
"""How often a waiting caller checks whether its request was cancelled."""
LONGEST_PAUSE_SECONDS = 10.0
"""The longest pause before another attempt, whatever ``Retry-After`` says."""
_FIRST_PAUSE_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_ERROR_BYTES = 16 * 1024
_BASE_BYTES = 1024 * 1024
_BYTES_PER_TOKEN = 4096
"""An event of one token takes about 300 bytes, more with log-probabilities; a server that sends more is stopped."""
_RETRIED = frozenset({429, 503})
"""Statuses after which the same request may succeed later."""
_SHOWN = 300
_TOO_LONG = re.compile(r"context[ _](length|window|size)|maximum context|too many tokens|n_ctx", re.IGNORECASE)
_ADVICE = {
    401: "; set RAG_POSFIX_REMOTE_API_KEY to a key of that server",
    403: "; set RAG_POSFIX_REMOTE_API_KEY to a key that may use this model",
    404: "; check the name of the model and the base URL in openai:NAME@URL",
}


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Time limits of a server, and the number of attempts.

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
        url: Base URL of the server.
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
        try:
            import httpx2
            from anyio.from_thread import start_blocking_portal
        except ImportError as error:
            raise missing_extra("httpx2", "remote") from error
        self.url = url
        self._limits = limits or ServerLimits()
        self._check_cancelled = check_cancelled
        self._client = httpx2.AsyncClient(
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(self._limits.read_seconds, connect=self._limits.connect_seconds),
            limits=httpx2.Limits(max_connections=None),  # the service bounds how many answers run
            follow_redirects=False,  # the key goes to the given server alone
        )
        stack = ExitStack()
        self._portal = stack.enter_context(start_blocking_portal(name="rag_posfix-remote"))
        stack.callback(self._portal.call, self._client.aclose)
        self.close = weakref.finalize(self, stack.close)  # the thread would outlive whoever forgets to close
        """Close all connections; running answers end with an error."""

    def post(self, route: str, body: Event, max_tokens: int) -> Generator[Event, None, None]:
        """Send a request and yield the JSON objects of its answer: one, or with ``stream`` one for each event.

        Nothing is sent before the first object is requested. Closing the iterator closes the connection.

        Args:
            route: Path below the base URL.
            body: The JSON body; its ``stream`` selects the kind of answer.
            max_tokens: Tokens of the answer, which bound its size in bytes.

        Raises:
            UpstreamTimeoutError: the server was silent for longer than ``read_seconds``.
            UpstreamError: the connection failed or was cut, or the answer is not what the API promises.
            OverloadedError: the server has no capacity (429), also after the retries.
            PromptTooLongError: the server reports that the prompt exceeds its context window.
        """
        received: SimpleQueue[Event | None] = SimpleQueue()
        max_bytes = _BASE_BYTES + _BYTES_PER_TOKEN * max_tokens
        try:
            task = self._portal.start_task_soon(partial(self._run, route, body, max_bytes, received.put))
        except RuntimeError as error:
            raise GenerationError(f"the connection to {self.url} was closed; make another generator") from error
        task.add_done_callback(lambda _: received.put(None))  # wakes whoever waits
        try:
            while True:
                self._check_cancelled()
                try:
                    event = received.get(timeout=POLL_SECONDS)
                except Empty:
                    continue
                if event is None:
                    break
                yield event
            task.result()
        finally:
            task.cancel()
            wait([task], timeout=_CLOSE_SECONDS)

    async def _run(self, route: str, body: Event, max_bytes: int, emit: Callable[[Event], None]) -> None:
        """Repeat the request until an answer or the last retry; emit the objects of the answer. In the event loop."""
        import anyio
        import httpx2

        for attempt in range(self._limits.retries + 1):
            try:
                pause = await self._attempt(route, body, max_bytes, emit, last=attempt == self._limits.retries)
            except httpx2.TimeoutException as error:
                _log.warning("the server at %s was silent for too long", self.url)
                raise UpstreamTimeoutError(
                    f"{self.url} was silent for {self._limits.read_seconds:g} s; raise "
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

    async def _attempt(
        self, route: str, body: Event, max_bytes: int, emit: Callable[[Event], None], *, last: bool
    ) -> float | None:
        """Emit the answer and return None, or return the seconds to wait before another attempt."""
        import httpx2

        headers = {"accept": "text/event-stream" if body.get("stream") else "application/json"}
        async with AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(
                    self._client.stream("POST", self.url + route, json=body, headers=headers)
                )
            except (httpx2.ReadTimeout, httpx2.WriteTimeout):
                raise  # the server may be at work: asking again would double it
            except httpx2.TransportError as error:
                _log.warning("the server at %s cannot be reached (%s)", self.url, type(error).__name__)
                if not last:
                    return 0.0
                raise UpstreamError(
                    f"{self.url} cannot be reached ({type(error).__name__}); check the URL, and that the server runs"
                ) from error
            if response.status_code in _RETRIED and not last:
                return _retry_after(response.headers.get("retry-after", ""))
            if response.status_code != 200:
                content = await _read_up_to(response, _ERROR_BYTES)
                _log.warning("the server at %s answered with status %d", self.url, response.status_code)
                raise failure_of_status(self.url, response.status_code, content)
            async for data in _contents(response, max_bytes, stream=bool(body.get("stream"))):
                if data is None:
                    raise UpstreamError(
                        f"{self.url} sent more than {max_bytes} bytes, too much for the tokens asked for"
                    )
                try:
                    event = json.loads(data)
                except (ValueError, RecursionError):
                    event = None
                if not isinstance(event, dict):
                    raise UpstreamError(
                        f"{self.url} sent an answer that is no JSON object; is it an OpenAI-compatible server?"
                    )
                emit(event)
        return None


async def _contents(response: httpx2.Response, max_bytes: int, *, stream: bool) -> AsyncIterator[str | bytes | None]:
    """Yield the body, or with ``stream`` the data of each event; None if there are more than ``max_bytes``."""
    import httpx2

    if not stream:
        content = await _read_up_to(response, max_bytes + 1)
        yield content if len(content) <= max_bytes else None
        return
    size = 0
    async for event in httpx2.EventSource(response, max_bytes):
        size += len(event.data)
        if size > max_bytes:
            yield None
        if event.data == "[DONE]":
            return
        if event.data:
            yield event.data


async def _read_up_to(response: httpx2.Response, max_bytes: int) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) >= max_bytes:
            break
    return bytes(content[:max_bytes])


def _retry_after(header: str) -> float:
    """Return the seconds of ``Retry-After``; 0 for none, and for a date, which clients may ignore."""
    try:
        seconds = float(header)
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < float("inf") else 0.0


def failure_of_status(server: str, status: int, body: bytes) -> GenerationError | OverloadedError | PromptTooLongError:
    """Return the error for a response that is not a success.

    Messages hold no key. A server's text may quote a prompt, so it is only in errors whose text the HTTP service
    does not send; ``OverloadedError`` and ``PromptTooLongError`` are sent as they are.
    """
    try:
        payload: Any = json.loads(body)
    except (ValueError, RecursionError):
        payload = None
    reason = error_message(payload) if isinstance(payload, dict) else ""
    message = f"{server} answered with status {status}{f': {reason}' if reason else ''}"
    if status in (400, 413, 422) and _TOO_LONG.search(reason):
        return PromptTooLongError(
            "the prompt exceeds the context window of the remote generator; use fewer or shorter passages, and set "
            "RAG_POSFIX_REMOTE_CONTEXT_WINDOW to the server's limit, so that passages are left out in time"
        )
    if status == 429:
        return OverloadedError("the remote generator has no capacity now (status 429); try again later")
    if status in (408, 504):
        return UpstreamTimeoutError(f"{message}; try again later, or lower max_tokens")
    return UpstreamError(message + _ADVICE.get(status, ""))


def error_message(payload: Mapping[str, Any]) -> str:
    """Return the message and the code of an error object, on one line; empty if there are none.

    Forms: ``{"error": {"message", "code"}}``, ``{"error": text}``, ``{"message": text}`` or ``{"detail": text}``.
    """
    inner = payload.get("error", payload)
    if not isinstance(inner, dict):
        inner = {"message": inner}
    texts = [inner.get(name) for name in ("message", "detail", "code")]
    line = " ".join(" ".join(text for text in texts if isinstance(text, str))[: 4 * _SHOWN].split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."
