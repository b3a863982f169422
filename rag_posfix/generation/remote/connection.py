"""HTTP to a server: an event loop in a thread of its own, one task per answer, cancelled with its caller.

A task holds its connection in a ``with`` block, so that cancelling closes it, also while the server is still reading
the prompt. A blocking client could only be stopped between two pieces of an answer. openai's client is not used: it
reads bodies and events of any size, repeats requests after errors that may leave a server at work, and sends headers
from ``OPENAI_*`` variables and of its platform to any server.

The address of a remote model: ``openai:NAME@URL``, or several servers of it: ``openai:NAME@URL,URL``.

Reading answers of OpenAI's chat completions, as OpenAI's own client reads them, from servers of any kind.

What a server's error says, and the error that is raised for it.
"""

from __future__ import annotations

import json
import logging
import random
import re
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from rag_posfix.contracts.request import FinishReason
from rag_posfix.errors import (
    ConfigError,
    GenerationError,
    NoAnswerError,
    OverloadedError,
    PromptTooLongError,
    UpstreamError,
    UpstreamTimeoutError,
    missing_extra,
)
from rag_posfix.text import REPLACEMENT, clean_text, content_hash

if TYPE_CHECKING:
    import httpx2


PREFIX = "openai:"
EXAMPLE = "openai:qwen2.5-7b-instruct@http://127.0.0.1:8080/v1"
_ADDRESS = re.compile(r"openai:(?P<name>.+)@(?P<url>https?://.+)", re.DOTALL)
_LONGEST = 2048
REST_SECONDS = 10.0
"""How long a server that failed is asked only if every other one failed too."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The name of a model on an OpenAI-compatible server, and the base URL of its API without a slash at the end.

    Several servers of the same model are base URLs separated by commas. The first one names the model in cache keys.
    """

    name: str
    url: str

    @property
    def urls(self) -> tuple[str, ...]:
        """The base URL of each server."""
        return tuple(self.url.split(","))


class Servers:
    """Equal servers, of which each key has an order of its own: rendezvous hashing, Thaler and Ravishankar (1998).

    Requests about one passage meet on one server, whose prefix cache then holds the passage. A server that is added
    takes its share of the keys; no key moves between the others. Used in one thread.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(urls)
        self._rests_until = dict.fromkeys(self.urls, 0.0)

    def choose(self, key: str, tried: Collection[str] = ()) -> str:
        """Return the first server in the order of ``key``; those that were tried or that rest come last."""
        if len(self.urls) == 1:
            return self.urls[0]
        now = time.monotonic()
        return min(
            self.urls, key=lambda url: (url in tried, self._rests_until[url] > now, content_hash("server", url, key))
        )

    def rest(self, url: str) -> None:
        """Note that a server failed."""
        self._rests_until[url] = time.monotonic() + REST_SECONDS


def is_remote(model: str) -> bool:
    """Return whether a model name means a model of a server."""
    return model.startswith(PREFIX)


def parse_remote(model: str) -> RemoteModel:
    """Read ``openai:NAME@URL`` or ``openai:NAME@URL,URL``.

    A URL is the base URL of the API, as OpenAI's clients take it. A URL without a path gets ``/v1``. The name may
    contain ``@``. Nothing is looked up.

    Raises:
        ConfigError: the text has another form, a URL holds a user, a password, a query or the path of a route, or two
            URLs are equal.
    """
    match = _ADDRESS.fullmatch(model) if len(model) <= _LONGEST else None
    if match is None or not match["name"].strip():
        raise ConfigError(f"model={_redact(model)} must be openai:NAME@URL, for example {EXAMPLE}")
    urls = [_base_url(model, text) for text in match["url"].split(",")]
    if len(set(urls)) < len(urls):
        raise ConfigError(f"model={_redact(model)}: each URL must be given once; remove the repeated one")
    return RemoteModel(match["name"].strip(), ",".join(urls))


def _base_url(model: str, text: str) -> str:
    try:
        url = urlsplit(text)
        url.port  # noqa: B018 - raises for a port that is no number
    except ValueError:  # its text quotes the URL, also where a password looks like a port
        raise ConfigError(
            f"model={_redact(model)}: the URL cannot be read: its host, or its port of 0 to 65535, is not valid; for "
            f"example {EXAMPLE}"
        ) from None
    if url.username is not None or url.password is not None:  # names of models are shown and logged
        raise ConfigError(
            "model=openai:...: the URL holds a user or a password; give the key in RAG_POSFIX_REMOTE_API_KEY"
        )
    path = url.path.rstrip("/")
    is_base = url.scheme in ("http", "https") and url.hostname and not url.query and not url.fragment
    if not is_base or re.search(r"[\s\x00-\x1f]", url.netloc + url.path):
        raise ConfigError(f"model={_redact(model)}: a URL is http(s)://HOST without a query; for example {EXAMPLE}")
    if path.endswith("/completions"):
        raise ConfigError(
            f"model={_redact(model)}: give the base URL, without the path of a route; for example {EXAMPLE}"
        )
    return urlunsplit((url.scheme, url.netloc, path or "/v1", "", ""))


def _redact(model: str) -> str:
    """Return a model name for an error message, shortened, without what may be a password or the key of a query.

    Where a wrong address has one of them is a guess, so all is left out behind the first place that it may begin at.
    """
    hidden = re.sub(r"(//|@)(?=.*[@?#]).*", r"\1...", model, flags=re.DOTALL)
    return repr(hidden if len(hidden) <= 200 else f"{hidden[:200]}...")


_SHOWN = 300
_TOO_LONG = re.compile(r"context[ _](length|window|size)|maximum context|too many tokens|n_ctx", re.IGNORECASE)
_ADVICE = {
    401: "; set RAG_POSFIX_REMOTE_API_KEY to a key of that server",
    403: "; set RAG_POSFIX_REMOTE_API_KEY to a key that may use this model",
    404: "; check the name of the model and the base URL in openai:NAME@URL",
}


def failure_of_status(
    server: str, status: int, body: bytes, retry_seconds: float = 0.0
) -> GenerationError | OverloadedError | PromptTooLongError:
    """Return the error for a response that is not a success; ``retry_seconds`` is its ``Retry-After``.

    Messages hold no key. A server's text may quote a prompt, so it is only in errors whose text the HTTP service
    does not send; ``OverloadedError`` and ``PromptTooLongError`` are sent as they are.
    """
    try:
        payload: Any = json.loads(body)
    except (ValueError, RecursionError):
        payload = None
    reason = error_message(payload)
    message = f"{server} answered with status {status}{f': {reason}' if reason else ''}"
    if status in (400, 413, 422) and _TOO_LONG.search(reason):
        return PromptTooLongError(
            "the prompt exceeds the context window of the remote generator; use fewer or shorter passages, and set "
            "RAG_POSFIX_REMOTE_CONTEXT_WINDOW to the server's limit, so that passages are left out in time"
        )
    if status == 429:
        return OverloadedError(
            "the remote generator has no capacity now (status 429); try again later", retry_seconds or None
        )
    if status in (408, 504):
        return UpstreamTimeoutError(f"{message}; try again later, or lower max_tokens")
    if status == 400 and "max_completion_tokens" in reason:
        message += "; set RAG_POSFIX_REMOTE_MAX_TOKENS_FIELD=max_completion_tokens"
    return UpstreamError(message + _ADVICE.get(status, ""), status)


def error_message(payload: Any) -> str:
    """Return the message and the code of an error object, on one line; empty if there are none.

    Forms: ``{"error": {"message", "code"}}``, ``{"error": text}``, ``{"message": text}``, ``{"detail": text}`` or
    ``{"detail": [{"msg": text}]}``; Gemini puts them into a list.
    """
    if isinstance(payload, list) and payload:
        payload = payload[0]
    if not isinstance(payload, dict):
        return ""
    inner = payload.get("error") or payload
    if not isinstance(inner, dict):
        inner = {"message": inner}
    detail = inner.get("detail")
    problems = [each.get("msg") for each in detail if isinstance(each, dict)] if isinstance(detail, list) else []
    texts = [inner.get("message"), detail, *problems, inner.get("code")]
    line = " ".join(" ".join(text for text in texts if isinstance(text, str))[: 4 * _SHOWN].split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."


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


_REASONS = {
    "stop": "stop eos eos_token end_turn stop_sequence stop_token complete completed done end finished tool_call "
    "tool_calls function_call",
    "length": "length max_tokens token_limit",
    "filter": "content_filter sensitive safety recitation blocklist prohibited_content spii refusal error_toxic",
    "interruption": "incomplete",
}
_KINDS = {reason: kind for kind, reasons in _REASONS.items() for reason in reasons.split()}
"""What a ``finish_reason`` means, of OpenAI, vLLM, SGLang, Mistral, DeepSeek, Zhipu, Gemini, Cohere and Anthropic."""
_WORDS = {
    "filter": "filter|safety|guardrail|block|prohibit|moderat",
    "interruption": "error|abort|cancel|fail|interrupt|timeout|timed_out|time_limit|insufficient|repetition|malformed"
    "|preempt|overload|disconnect|not_finished|unfinished|killed|exception",
    "length": "length|token_limit|max(imum)?_.*token|max_len|context_(window|size|limit)",
    "stop": "^(stop|eos|end)_",
}
"""Words in further reasons of these servers, and of others that name a reason in the same way."""
_NO_REASON = ("", "null", "none")


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How an answer ended. A reason that is not known counts as ``stop``, and such an answer is not cached."""

    reason: FinishReason
    is_known: bool = True


def unreadable_answer(url: str, what: str) -> UpstreamError:
    """Return the error for an answer of another form."""
    return UpstreamError(f"{url} sent {what}; is it an OpenAI-compatible server?")


def first_choice(event: Event, url: str, *, is_part: bool = False) -> Event | None:
    """Return the first choice of an object; None if it has none, as the last one of a stream, with the usage.

    Args:
        is_part: It is an object of a stream; some servers send usage and signs of life there without ``choices``, or
            with null.
    """
    choices = event.get("choices")
    says_more = is_part and not choices  # an error may have a form of its own
    reason = error_message(event) if says_more or event.get("error") else ""
    if event.get("error") or reason or (says_more and "error" in (event.get("object"), event.get("type"))):
        raise UpstreamError(f"{url} failed while it generated the answer{f': {reason}' if reason else ''}")
    if choices is None and is_part:
        return None
    if not isinstance(choices, list) or (choices and not isinstance(choices[0], dict)):
        raise unreadable_answer(url, "an object without choices")
    if choices and choices[0].get("error"):
        return first_choice({"error": choices[0]["error"]}, url)
    return choices[0] if choices else None


def end_of(choice: Event, url: str) -> AnswerEnd | None:
    """Return how the answer of a choice ended, None if it has not ended: servers without null send "" or "null".

    Raises:
        UpstreamError: the server broke the answer off, or its content filter did.
    """
    said = choice.get("finish_reason")
    if isinstance(said, Mapping):  # SGLang's own form
        said = said.get("type")
    name = re.sub(r"[^a-z0-9]+", "_", str(said or "").lower()).removeprefix("finish_reason_")
    if name in _NO_REASON:
        return None
    kind = _KINDS.get(name) or next((kind for kind, words in _WORDS.items() if re.search(words, name)), None)
    if kind == "filter":
        raise UpstreamError(f"{url} withheld the answer: its content filter stopped it (finish_reason {said!r:.60})")
    if kind == "interruption":
        raise UpstreamError(
            f"{url} gave up in the middle of the answer (finish_reason {said!r:.60}); try again, or see its log"
        )
    if kind is not None:
        return AnswerEnd("length" if kind == "length" else "stop")
    _log.warning(
        "the server at %s ended an answer with finish_reason %.60r, which is not known: not cached", url, said
    )
    return AnswerEnd("stop", is_known=False)


def content_of(message: object, url: str) -> str | None:
    """Return the content of a message or of a part of one, as sent; None for no content.

    Content may be a list of parts: texts are joined, thoughts are withheld.
    """
    fields = message if isinstance(message, Mapping) else {}
    if fields.get("tool_calls") or fields.get("function_call"):
        raise NoAnswerError("the remote model called a tool instead of answering; turn off its tools")
    content = joined_texts(fields.get("content"))
    if content is not None and not isinstance(content, str):
        raise unreadable_answer(url, "a message whose content is no text")
    return content


def joined_texts(content: Any) -> Any:
    """Return a content of parts as the text of those that hold text; another content as it is."""
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list) or not all(isinstance(part, str | Mapping) for part in parts):
        return content
    return "".join(map(_text_of, parts))


def _text_of(part: str | Mapping[str, Any]) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if part.get("type") in (None, "text", "output_text") else None
    if isinstance(text, Mapping):  # OpenAI's assistants
        text = text.get("value")
    return text if isinstance(text, str) else ""


def split_sound(content: str) -> tuple[str, str]:
    """Return the text without the half of a character at its end, and that half: the next part may complete it.

    A character beyond U+FFFF may come as two surrogates in two parts; a token may end within a character.
    """
    joined = content.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    end = len(joined)
    while end and (joined[end - 1] == REPLACEMENT or "\ud800" <= joined[end - 1] < "\udc00"):
        end -= 1
    return clean_text(joined[:end]), joined[end:]


def withholds(message: object) -> bool:
    """Return whether a message, or a part of one, holds a refusal or reasoning beside its content."""
    fields: Mapping[str, Any] = message if isinstance(message, Mapping) else {}
    return bool(isinstance(fields.get("content"), list | Mapping) and fields["content"]) or any(
        fields.get(name) for name in ("refusal", "reasoning_content", "reasoning")
    )


def no_text(message: object) -> NoAnswerError:
    """Return the error for an answer without content: refused, or all tokens went into reasoning."""
    if isinstance(message, Mapping) and message.get("refusal"):
        return NoAnswerError("the remote model refused to answer; ask differently")
    return NoAnswerError("the remote model ended its answer without any content; raise max_tokens, or ask differently")
