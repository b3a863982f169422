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
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rag_posfix.errors import ConfigError, GenerationError, UpstreamError, UpstreamTimeoutError, missing_extra
from rag_posfix.generation.remote.address import Servers
from rag_posfix.generation.remote.failures import failure_of_status

if TYPE_CHECKING:
    import httpx2

_log = logging.getLogger(__name__)

Event = Mapping[str, Any]
"""One JSON object of an answer."""
DONE: Event = {}
"""What a stream yields for ``[DONE]``: the server says that the answer is complete."""

POLL_SECONDS = 0.05
"""How often a waiting caller checks whether its request was cancelled."""
LONGEST_PAUSE_SECONDS = 10.0
"""The longest pause before another attempt; a server that asks for more is not asked again."""
STALE_SECONDS = 0.2
"""A server that drops a request sooner did not work on it: it had closed the idle connection before."""
_FIRST_PAUSE_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_ERROR_BYTES = 16 * 1024
_BASE_BYTES = 1024 * 1024
_BYTES_PER_TOKEN = 4096
"""An event of one token takes about 300 bytes, more with log-probabilities; a server that sends more is stopped."""
_DONE = "[DONE]"
_RETRIED = frozenset({429, 503})
"""Statuses after which the same request may succeed later."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Time limits of a server, and the number of attempts.

    Attributes:
        connect_seconds: Time limit for opening a connection.
        read_seconds: How long the server may be silent: before the first token, and between two pieces of an answer.
        retries: Further attempts after status 429 or 503, where no connection was made, and where one was closed at
            once. One that is closed later may have cost a whole answer, and only another server is asked. Every
            further server adds one attempt.
        concurrency: Requests of ``post_all`` that are sent at the same time, those of all questions together.
    """

    connect_seconds: float = 10.0
    read_seconds: float = 120.0
    retries: int = 2
    concurrency: int = 16

    def __post_init__(self) -> None:
        if self.connect_seconds <= 0 or self.read_seconds <= 0 or self.retries < 0 or self.concurrency < 1:
            raise ConfigError(f"time limits and concurrency must be above 0 and retries at least 0, got {self}")


class Connection:
    """Connections to one server, or to several of one model. Safe to share between threads.

    Args:
        url: Base URL of the server, or those of several, separated by commas. The key of a request then decides which
            server gets it. One that fails rests for 10 s, and its requests go to the next one in the order of their
            key, if no part of the answer came.
        api_key: Sent as ``Authorization: Bearer``; None sends none. It is in no message and no log.
        check_cancelled: Called while an answer is awaited; what it raises ends the request and is raised there.
        remaining_seconds: Returns the seconds that the request of the running thread has left.

    Raises:
        ConfigError: httpx2 is not installed.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        limits: ServerLimits | None = None,
        check_cancelled: Callable[[], None] = lambda: None,
        remaining_seconds: Callable[[], float] = lambda: inf,
    ) -> None:
        try:
            import httpx2
            from anyio import CapacityLimiter
            from anyio.from_thread import start_blocking_portal
        except ImportError as error:
            raise missing_extra("httpx2", "remote") from error
        self.url = url
        self.servers = Servers(url.split(","))
        self._limits = limits or ServerLimits()
        self._check_cancelled = check_cancelled
        self._remaining_seconds = remaining_seconds
        try:
            self._client = httpx2.AsyncClient(
                headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
                timeout=httpx2.Timeout(self._limits.read_seconds, connect=self._limits.connect_seconds),
                limits=httpx2.Limits(max_connections=None),  # the service bounds how many answers run
                follow_redirects=False,  # the key goes to the given server alone
            )
        except (ValueError, ImportError, httpx2.InvalidURL) as error:
            raise ConfigError(
                f"the proxies of the environment ({_proxies()}) cannot be used: a proxy must be http://HOST:PORT or "
                "https://HOST:PORT, socks5://HOST:PORT with the package socksio; correct them, or name the server in "
                "NO_PROXY"
            ) from error
        stack = ExitStack()
        self._portal = stack.enter_context(start_blocking_portal(name="rag_posfix-remote"))
        stack.callback(self._portal.call, self._client.aclose)
        self._permits = self._portal.call(CapacityLimiter, self._limits.concurrency)
        self.close = weakref.finalize(self, stack.close)  # the thread would outlive whoever forgets to close
        """Close all connections; running answers end with an error."""

    def post(self, route: str, body: Event, max_tokens: int, key: str = "") -> Generator[Event, None, None]:
        """Send a request and yield the JSON objects of its answer: one, or with ``stream`` one for each event.

        Nothing is sent before the first object is requested. Closing the iterator closes the connection.

        Args:
            route: Path below the base URL.
            body: The JSON body; its ``stream`` selects the kind of answer.
            max_tokens: Tokens of the answer, which bound its size in bytes.
            key: Content key of the passage that the prompt begins with; it chooses among several servers.

        Raises:
            UpstreamTimeoutError: the server was silent for longer than ``read_seconds``.
            UpstreamError: the connection failed or was cut, or the answer is not what the API promises.
            OverloadedError: the server has no capacity (429), also after the retries. A ``Retry-After`` beyond 10 s or
                beyond the time limit of the request is not waited for.
            PromptTooLongError: the server reports that the prompt exceeds its context window.
        """
        received: SimpleQueue[Event | None] = SimpleQueue()
        task = self._start(route, body, max_tokens, received.put, key)
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

    def get(self, route: str) -> Event:
        """Return the JSON object of a route. Errors as those of ``post``."""
        received: list[Event] = []
        self._start(route, None, 0, received.append).result()
        return received[0]

    def post_all(
        self,
        route: str,
        bodies: Sequence[Event],
        max_tokens: int,
        check: Callable[[], None] = lambda: None,
        keys: Sequence[str] | None = None,
    ) -> list[Event]:
        """Send requests together, none of them with ``stream``, and return the objects of their answers.

        They begin in the given order, at most ``concurrency`` at a time. A request that waits for another attempt
        holds none of these permits. An error of one, or of ``check``, ends all.

        Args:
            check: Called while answers are awaited; what it raises is raised here.
            keys: The ``key`` of each request, as for ``post``.

        Raises:
            UpstreamError: as for ``post``, and with it the other errors of ``post``.
        """
        answers: list[list[Event]] = [[] for _ in bodies]
        requests = zip(bodies, answers, [""] * len(bodies) if keys is None else keys, strict=True)
        tasks = [
            self._start(route, body, max_tokens, answer.append, key, self._permits) for body, answer, key in requests
        ]
        pending = set(tasks)
        try:
            while pending:
                self._check_cancelled()
                check()
                done, pending = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_EXCEPTION)
                for task in done:
                    task.result()
        finally:
            for task in pending:
                task.cancel()
            wait(pending, timeout=_CLOSE_SECONDS)
        return [answer[0] for answer in answers]

    def _start(
        self,
        route: str,
        body: Event | None,
        max_tokens: int,
        emit: Callable[[Event], None],
        key: str = "",
        permits: AbstractAsyncContextManager[Any] | None = None,
    ) -> Future[None]:
        max_bytes = _BASE_BYTES + _BYTES_PER_TOKEN * max_tokens
        permits = nullcontext() if permits is None else permits
        try:
            run = partial(self._run, route, body, max_bytes, emit, key, self._remaining_seconds(), permits)
            return self._portal.start_task_soon(run)
        except RuntimeError as error:
            raise self._closed() from error

    def _closed(self) -> GenerationError:
        return GenerationError(f"the connection to {self.url} was closed; make another generator")

    async def _run(
        self,
        route: str,
        body: Event | None,
        max_bytes: int,
        emit: Callable[[Event], None],
        key: str,
        seconds: float,
        permits: AbstractAsyncContextManager[Any],
    ) -> None:
        """Repeat the request until an answer or the last retry; emit the objects of the answer. In the event loop.

        ``permits`` is held during an attempt, not between attempts. Another server is asked without a pause.
        """
        import anyio
        import httpx2

        emitted: list[None] = []

        def emit_next(event: Event) -> None:
            emitted.append(None)
            emit(event)

        end, urls, tried = anyio.current_time() + seconds, self.servers.urls, set[str]()
        last = self._limits.retries + len(urls) - 1
        for attempt in range(last + 1):
            url = self.servers.choose(key, tried)
            tried = {*tried, url} if len(tried) < len(urls) else {url}
            has_other = len(tried) < len(urls) and attempt < last
            longest = min(LONGEST_PAUSE_SECONDS, end - anyio.current_time())
            try:
                async with permits:
                    pause = await self._attempt(
                        url, route, body, max_bytes, emit_next,
                        inf if has_other else None if attempt == last else longest,
                    )  # fmt: skip
            except httpx2.TimeoutException as error:
                self.servers.rest(url)
                _log.warning("the server at %s was silent for too long", url)
                raise UpstreamTimeoutError(
                    f"{url} was silent for {self._limits.read_seconds:g} s; raise "
                    "RAG_POSFIX_REMOTE_TIMEOUT_SECONDS, or use fewer passages"
                ) from error
            except httpx2.SSEError as error:
                raise UpstreamError(f"{url} sent no stream of events: {error}") from error
            except (httpx2.HTTPError, httpx2.StreamError) as error:
                self.servers.rest(url)
                if emitted or not has_other:
                    raise UpstreamError(
                        f"the connection to {url} failed in the middle of an answer ({type(error).__name__})"
                    ) from error
                pause = 0.0
            if pause is None:
                return
            if not has_other:
                backoff = _FIRST_PAUSE_SECONDS * 2 ** (attempt // len(urls)) * random.uniform(0.5, 1.0)
                await anyio.sleep(min(max(pause, backoff), LONGEST_PAUSE_SECONDS))

    async def _attempt(
        self,
        url: str,
        route: str,
        body: Event | None,
        max_bytes: int,
        emit: Callable[[Event], None],
        longest_pause: float | None,
    ) -> float | None:
        """Emit the answer and return None, or return the seconds to wait before another attempt.

        Without a body it is a GET. A ``longest_pause`` of None is for the last attempt, infinity if another server is
        next.
        """
        import httpx2

        if self._client.is_closed:  # while the request waited
            raise self._closed()
        is_stream = body is not None and bool(body.get("stream"))
        headers = {"accept": "text/event-stream" if is_stream else "application/json"}
        method = "GET" if body is None else "POST"
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(
                    self._client.stream(method, url + route, json=body, headers=headers)
                )
            except (httpx2.ReadTimeout, httpx2.WriteTimeout):
                raise  # the server may be at work: asking again would double it
            except httpx2.LocalProtocolError:  # its text may quote a header, and with it the key
                raise UpstreamError(f"the request to {url} is no valid HTTP; check the URL and the key") from None
            except httpx2.TransportError as error:
                self.servers.rest(url)
                failure, is_unread = _failure_of_transport(url, error, time.monotonic() - started)
                _log.warning("%s", failure)
                if longest_pause == inf or (longest_pause is not None and is_unread):
                    return 0.0
                raise UpstreamError(failure) from error
            pause = _retry_after(response.headers)
            failed = response.status_code >= 500
            if failed:
                self.servers.rest(url)
            retried = response.status_code in _RETRIED or (failed and longest_pause == inf)
            if retried and longest_pause is not None and pause <= longest_pause:
                return pause
            if response.status_code != 200:
                content = await _read_up_to(response, _ERROR_BYTES)
                _log.warning("the server at %s answered with status %d", url, response.status_code)
                raise failure_of_status(url, response.status_code, content, pause)
            async for data in _contents(response, max_bytes, stream=is_stream):
                if data is None:
                    raise UpstreamError(f"{url} sent more than {max_bytes} bytes, too much for the tokens asked for")
                for event in _events_of(data, url):
                    emit(event)
        return None


def _events_of(data: str | bytes, url: str) -> list[Event]:
    """Return the JSON object of an answer or of an event; those of its lines if they are no object together.

    Some servers put one newline behind an event, where two end it.
    """
    try:
        return [_event_of(data, url)]
    except UpstreamError:
        lines = data.split("\n") if isinstance(data, str) else []
        if len(lines) < 2:
            raise
        return [_event_of(line, url) for line in lines if line.strip()]


def _event_of(data: str | bytes, url: str) -> Event:
    """Return the JSON object of an answer or of an event, ``DONE`` for the mark of an end."""
    if isinstance(data, str) and data.strip() == _DONE:
        return DONE
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if isinstance(event, list):  # text-embeddings-inference ranks in a bare list
        event = {"results": event}
    if not isinstance(event, dict):
        raise UpstreamError(f"{url} sent an answer that is no JSON object; is it an OpenAI-compatible server?")
    return event


def _failure_of_transport(url: str, error: httpx2.TransportError, seconds: float) -> tuple[str, bool]:
    """Return what failed, and whether the same request may be sent again: the server has not worked on it."""
    import httpx2

    name = type(error).__name__
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout | httpx2.ProxyError):
        host = urlsplit(url).hostname or ""
        through = (
            f" through the proxies of the environment ({_proxies()})" if _proxies() and not proxy_bypass(host) else ""
        )
        return f"{url} cannot be reached{through} ({name}); check the URL, and that the server runs", True
    message = f"{url} closed the connection without an answer ({name}); see its log, and the time limits of proxies"
    return message, seconds < STALE_SECONDS


def _proxies() -> str:
    """Return the proxies that the environment names, without their passwords."""
    named = {name: urlsplit(proxy) for name, proxy in getproxies().items() if name in ("http", "https", "all")}
    return ", ".join(
        f"{name.upper()}_PROXY={parts.scheme}://{parts.netloc.rpartition('@')[2]}" for name, parts in named.items()
    )


async def _contents(response: httpx2.Response, max_bytes: int, *, stream: bool) -> AsyncIterator[str | bytes | None]:
    """Yield the body, or with ``stream`` the data of each event; None if there are more than ``max_bytes``.

    A server that does not stream sends a whole answer as JSON. Gateways give streams any type, or none.
    """
    import httpx2

    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not stream or kind.endswith("json"):
        content = await _read_up_to(response, max_bytes + 1)
        yield content if len(content) <= max_bytes else None
        return
    if kind in ("text/html", "application/xhtml+xml"):
        raise httpx2.SSEError(f"its answer is a page, of type {kind}")
    size = 0
    async for event in httpx2.EventSource(cast("httpx2.Response", _EndedStream(response)), max_bytes):
        size += len(event.data)
        if size > max_bytes:
            yield None
        if event.data:
            yield event.data
        if event.data.rstrip().endswith(_DONE):
            return


class _EndedStream:
    """A response as ``EventSource`` reads it, with the blank line that ends the last event: some servers omit it."""

    headers: ClassVar[Mapping[str, str]] = {"content-type": "text/event-stream"}

    def __init__(self, response: httpx2.Response) -> None:
        self.request, self._response = response.request, response

    async def aiter_text(self) -> AsyncIterator[str]:
        async for text in self._response.aiter_text():
            yield text
        yield "\n\n"


async def _read_up_to(response: httpx2.Response, max_bytes: int) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) >= max_bytes:
            break
    return bytes(content[:max_bytes])


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of ``retry-after-ms`` or ``Retry-After``, which may be a date; 0 for none."""
    said = headers.get("retry-after", "")
    try:
        milliseconds = headers.get("retry-after-ms")
        seconds = float(said) if milliseconds is None else float(milliseconds) / 1000
    except ValueError:
        try:
            seconds = max(parsedate_to_datetime(said).timestamp() - time.time(), 0.0)
        except ValueError:
            return 0.0
    return seconds if 0 <= seconds < inf else 0.0
