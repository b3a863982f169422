"""What surrounds every route: host names, API keys, body size, error responses, request ids, counts, spans, log lines.

The middlewares raise what they reject; ``ObservedRequests``, the outermost one, sends the error. Counts and log lines
contain no text of a client or a model: no prompt, passage, answer or unknown path.

JSON of requests and responses: bodies of bounded shape in, compact JSON and server-sent events out.

A parser and a validator cost microseconds for each value, so a small body of many values costs far more than a large
text. ``check_shape`` counts values in the bytes: a rejected body is never parsed. Lone surrogates, which JSON can
escape and UTF-8 cannot encode, become U+FFFD in both directions.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import anyio
import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette._utils import get_route_path  # what routes are chosen by: behind a prefix it is not the whole path
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_posfix.errors import GenerationCancelled, OverloadedError, RagPosfixError
from rag_posfix.parameters import shown
from rag_posfix.text import clean_text
from rag_posfix_api.http.auth import CALLER, KeyChecker, Quotas, Rejections, source_of
from rag_posfix_api.http.errors import (
    ErrorForm,
    Problem,
    RequestError,
    log_failure,
    one_line,
    problem_of,
    spec_of,
)
from rag_posfix_api.http.metrics import REQUEST_ID, Identifiers, LogFields, Metrics

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


MAX_VALUES: Final = 50_000
"""Strings, numbers, names, lists and objects in a body."""
MAX_DEPTH: Final = 64
"""Lists and objects nest at most so deep in a body."""
MAX_LIST: Final = 4096
"""Entries of a list directly in the body."""

FILTER_FIELDS: Final = ("filter", "filters", "where", "acl")
"""Names that other programs give to filters."""

_PIECE_BYTES = 64 * 1024

_BRACKET = re.compile(rb"[\[{\]}]")
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def encode_json(payload: Any) -> bytes:
    """Return ``payload`` as compact UTF-8 JSON: a lone surrogate becomes U+FFFD, a number that is not finite null."""
    try:
        return orjson.dumps(payload)
    except orjson.JSONEncodeError:  # a lone surrogate, or a number of more than 64 bits: rare, and slower
        text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return clean_text(text).encode()


def event(payload: Any, name: str | None = None) -> bytes:
    """Return one server-sent event, of type ``name`` for dialects whose clients read the type."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + encode_json(payload) + b"\n\n"


def typed_event(name: str, **fields: Any) -> bytes:
    """Return one server-sent event whose payload repeats its type."""
    return event({"type": name, **fields}, name)


class UnreadResponses:
    """Bytes of large responses that clients have not read yet, by tenant. For one event loop.

    Args:
        max_bytes: Of all such responses of a tenant together; a single one may be larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def hold(self, tenant: str, size: int) -> Iterator[None]:
        """Count a response while it is sent; OverloadedError if too many bytes of the tenant are unread."""
        unread = self._bytes[tenant]
        if unread and unread + size > self._max_bytes:
            raise OverloadedError(f"{unread} bytes of earlier responses are not read yet; read them, then ask again")
        self._bytes[tenant] += size
        try:
            yield
        finally:
            self._bytes[tenant] -= size
            if not self._bytes[tenant]:
                del self._bytes[tenant]


class SafeJSONResponse(Response):
    """A JSON response encoded by ``encode_json``; bytes are encoded already.

    A large one is sent as its client reads it. It counts as a request in flight, and for its tenant, until then.
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return content if isinstance(content, bytes) else encode_json(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        body = bytes(self.body)
        if len(body) <= _PIECE_BYTES:
            await super().__call__(scope, receive, send)
            return
        service = scope["app"].state.service
        with service.rerank.open(), service.unread.hold(CALLER.get().tenant, len(body)):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(body), _PIECE_BYTES):
                stop = start + _PIECE_BYTES  # the next piece waits until the connection has sent this one
                await send({"type": "http.response.body", "body": body[start:stop], "more_body": stop < len(body)})


class CleanRoute(APIRoute):
    """A route whose request body has a bounded shape and no lone surrogates."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler."""
        handler = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation
        body_fields = frozenset(getattr(model, "model_fields", ()))

        async def clean(request: Request) -> Response:
            checked = _CleanRequest(request.scope, request.receive)
            try:
                check_shape(await checked.body())
            except ClientDisconnect as error:
                raise GenerationCancelled("the client went away before its request was complete") from error
            try:
                body = await checked.json()
            except (ValueError, RecursionError):
                pass  # reported when the route reads the body
            else:
                check_lists(body, request.app.state.service.limits.max_documents)
                check_filter_fields(body, body_fields)
            return await handler(checked)

        return clean


class _CleanRequest(Request):
    async def json(self) -> Any:
        """Return the body, which is UTF-8; each lone surrogate in it becomes U+FFFD, in names as well as in values."""
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                text = body.decode("utf-8-sig", "surrogatepass")
            except UnicodeDecodeError as error:  # ``check_shape`` counts bytes: of UTF-16 it would see no structure
                raise json.JSONDecodeError(f"the body is not UTF-8 ({error.reason})", "", error.start) from error
            self._json = json.loads(text)
            if _MAYBE_SURROGATE.search(body) is not None:
                # The parser has joined the pairs: surrogates that are left are lone ones.
                self._json = json.loads(_SURROGATE.sub("\ufffd", json.dumps(self._json, ensure_ascii=False)))
        return self._json


def check_shape(body: bytes) -> int:
    """Return an estimate of the number of values; raise for too many values or levels. The body may be invalid JSON.

    Cost: linear; about 40 ms for 8 MB.

    Raises:
        RequestError: there are more than ``MAX_VALUES`` values, or more than ``MAX_DEPTH`` levels.
    """
    # Escapes occur in strings only. Without them, the quotes separate strings from structure.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    values = plain.count(b'"') // 2
    _check_values(values)
    outside = b'"'.join(plain.split(b'"')[::2])
    # A comma or colon precedes all values but the first of each list and object.
    values = max(values, sum(outside.count(mark) for mark in (b",", b":", b"[", b"{")))
    _check_values(values)
    depth = deepest = 0
    for bracket in _BRACKET.findall(outside):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise RequestError(
            f"the body nests lists and objects {deepest} levels deep, at most {MAX_DEPTH} are allowed; "
            "write it flatter",
            code="nested_too_deep",
        )
    return values


def _check_values(count: int) -> None:
    if count > MAX_VALUES:
        raise RequestError(
            f"the body has about {count} JSON values, at most {MAX_VALUES} are allowed; send fewer documents or "
            "messages, with less metadata",
            code="too_many_values",
        )


def check_filter_fields(body: Any, body_fields: Collection[str]) -> None:
    """Raise for a field of the body that looks like a filter and is none: it must not be ignored.

    Args:
        body_fields: The fields of the route's body.
    """
    for name in FILTER_FIELDS if isinstance(body, dict) else ():
        if body.get(name) is None or name in body_fields:
            continue
        correct_name = next((field for field in ("posfix", "filter") if field in body_fields), None)
        if correct_name is None:
            advice = "this route reads only what the request sends; leave it out"
        else:
            advice = f"give the filter as {'posfix.filter' if correct_name == 'posfix' else 'filter'}"
        raise RequestError(f"{name} is not a field of this request; {advice}", param=name, code="unsupported")


def check_lists(body: Any, max_documents: int) -> None:
    """Raise if a field of the body is a list of more than ``max_documents`` and ``MAX_LIST`` entries.

    Dialects may allow fewer.
    """
    max_entries = max(max_documents, MAX_LIST)
    for name, value in body.items() if isinstance(body, dict) else ():
        if isinstance(value, list) and len(value) > max_entries:
            field = name if len(name) <= 60 else f"{name[:57]}..."
            raise RequestError(
                f"{field} has {len(value)} entries, at most {max_entries} are allowed",
                param=field,
                code="list_too_long",
            )


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_CLOSED = 499
"""The client left before there was a response: this status was never sent."""


class RequestSpan:
    """The server span of one request; without a span a no-op."""

    def __init__(self, span: Span | None = None, method: str = "") -> None:
        self._span = span
        self._method = method

    def finish(self, route: str | None, status: int, code: str, tenant: str) -> None:
        """Set name, status and error of the span.

        Args:
            route: The template of the path, or None if no route was reached.
            code: ``ok``, or the code of the error.
        """
        if self._span is None:
            return
        from opentelemetry.trace import StatusCode

        if route is not None:
            self._span.update_name(f"{self._method} {route}")
            self._span.set_attribute("http.route", route)
        if status != _CLOSED:
            self._span.set_attribute("http.response.status_code", status)
        if tenant:
            self._span.set_attribute("rag_posfix.tenant", tenant)
        if code != "ok":
            self._span.set_attribute("error.type", code)
        # A stream that failed has the status 200. Errors and disconnects of clients are no failures here.
        if status >= 500 or (status < 400 and code not in ("ok", "client_closed_request")):
            self._span.set_status(StatusCode.ERROR)

    def ids(self) -> Mapping[str, str]:
        """Return the ids of trace and span for the log, in hexadecimal, as other programs show them."""
        if self._span is None:
            return {}
        context = self._span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


@contextmanager
def request_span(tracer: Tracer | None, scope: Scope, request_id: str) -> Iterator[RequestSpan]:
    """Make the span of a request the current one during the block, in worker threads too; none without a tracer.

    Its parent is the span of the header ``traceparent``; other formats are read if ``OTEL_PROPAGATORS`` names them.
    """
    if tracer is None:
        yield RequestSpan()
        return
    from opentelemetry import propagate, trace

    carrier: dict[str, str] = {}
    for name, value in scope["headers"]:
        carrier.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
    span = tracer.start_span(
        method if method in _METHODS else "HTTP",
        propagate.extract(carrier),
        trace.SpanKind.SERVER,
        {
            "http.request.method": method,
            "url.scheme": scope.get("scheme", "http"),
            "rag_posfix.request_id": request_id,
        },
    )
    with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        yield RequestSpan(span, method)


_access = logging.getLogger("rag_posfix_api.access")

FormOf = Callable[[str], ErrorForm]
"""Returns the form of the errors of a path."""

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
OPEN_PATHS = frozenset({"/livez", "/readyz", "/healthz", "/health", "/", "/docs", "/openapi.json"})
"""What orchestrators ask without a key, and the pages, which ask for the key, with the document of the API."""
OPEN_FOLDERS = ("/page/", "/docs/")
"""The files of the pages."""

_RETRY_SECONDS = 1
_MAX_RETRY_SECONDS = 600
_ROUTED_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
# Goes into logs and headers unchanged, so only plain ids.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_NO_DIALECT = "none"
_QUIET = frozenset({"/livez", "/readyz", "/healthz", "/health", "/metrics"})


def error_response(error: Exception, form: ErrorForm) -> Response:
    """Return the response to ``error`` in the form of a dialect."""
    problem = problem_of(error)
    headers = {}
    if problem.status in (429, 503):
        seconds = getattr(error, "retry_seconds", None) or _RETRY_SECONDS
        headers["retry-after"] = str(min(max(math.ceil(seconds), _RETRY_SECONDS), _MAX_RETRY_SECONDS))
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    if problem.status == 415:
        headers["accept-encoding"] = "identity"
    return SafeJSONResponse(form(problem), problem.status, headers)


def install_handlers(app: FastAPI, form_of: FormOf) -> None:
    """Install handlers in ``app`` that render every error of a route in the dialect of its path."""

    async def handle_known(request: Request, error: Exception) -> Response:
        request.state.log_fields.error = spec_of(error).code
        return error_response(error, form_of(get_route_path(request.scope)))

    async def handle_routing(request: Request, error: Any) -> Response:
        status, message, headers = error.status_code, str(error.detail), error.headers
        path = get_route_path(request.scope)
        code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
        if status == 404:
            message = f"nothing is served at {request.method} {path!r}; GET /openapi.json lists what is"
        elif status == 405:
            message = f"{path!r} does not take {request.method}; the header 'allow' says what it takes"
            headers = {"allow": ", ".join(_allowed_methods(request))}
        request.state.log_fields.error = code
        return SafeJSONResponse(form_of(path)(Problem(status, code, one_line(message))), status, headers)

    app.add_exception_handler(RagPosfixError, handle_known)
    app.add_exception_handler(RequestValidationError, handle_known)
    app.add_exception_handler(HTTPException, handle_routing)


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods that the path of ``request`` takes. The router itself names the methods of one route."""
    scopes = {method: {**request.scope, "method": method} for method in _ROUTED_METHODS}
    routes = request.app.routes
    return [m for m, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)]


class AllowedHosts:
    """ASGI middleware that rejects requests to other names with 403. A request without the header ``Host`` passes.

    For a service on loopback without a key, which pages of other sites must not reach: a page can resolve its own name
    to 127.0.0.1 and then send requests to local services from a user's browser ("DNS rebinding"). Such requests carry
    the name of the page in ``Host``. ``names`` are without a port.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or reject one request."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        name, colon, port = host.rpartition(":")
        if host and (name if colon and port.isdecimal() else host).lower() not in self._names:
            raise RequestError(
                "this service is bound to loopback without a key, and takes requests to localhost only; call it by "
                "'localhost' or 127.0.0.1, or set RAG_POSFIX_SERVICE_API_KEY",
                code="forbidden_host",
            )
        await self._app(scope, receive, send)


class ApiKeyAuth:
    """ASGI middleware that identifies the caller by the API key, checks its scope and counts its requests.

    Keys are sent as ``Authorization: Bearer`` or ``x-api-key``. The caller is then in ``CALLER``. Requests are
    rejected before their body is read.
    """

    def __init__(self, app: ASGIApp, checker: KeyChecker, quotas: Quotas) -> None:
        self._app = app
        self._checker = checker
        self._quotas = quotas
        self._rejections = Rejections()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or reject one request."""
        if scope["type"] != "http" or (path := get_route_path(scope)) in OPEN_PATHS or path.startswith(OPEN_FOLDERS):
            await self._app(scope, receive, send)
            return
        source = source_of(scope)
        try:
            caller = await self._checker.allowed(scope["method"], path, Headers(scope=scope))
        except RequestError as error:
            if error.code == "invalid_api_key":
                await anyio.sleep(self._rejections.pause(source))
            raise
        fields = scope["state"]["log_fields"]
        fields.key, fields.tenant = caller.key_id, caller.tenant
        releases = [await self._quotas.take(caller)]

        async def send_released(message: Message) -> None:
            # Before the end of the response: its client may send the next request at once.
            if releases and message["type"] == "http.response.body" and not message.get("more_body"):
                await releases.pop()()
            await send(message)

        token = CALLER.set(caller)
        try:
            await self._app(scope, receive, send_released)
        finally:
            CALLER.reset(token)
            for release in releases:
                await release()


class HeadRequests:
    """ASGI middleware that answers HEAD as GET, without the body, where a route takes GET."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        as_get = {**scope, "method": "GET"}
        if (
            scope["type"] != "http"
            or scope["method"] != "HEAD"
            or not any(route.matches(as_get)[0] is Match.FULL for route in self._routes)
        ):
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            scope["method"] = "HEAD"  # servers then leave out the body
            await send(message)

        scope["method"] = "GET"
        await self._app(scope, receive, send_head)


class BodyLimit:
    """ASGI middleware that limits the size of request bodies, and rejects compressed ones."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or reject one request."""
        if scope["type"] == "http":
            encoding = Headers(scope=scope).get("content-encoding", "identity").strip()
            if encoding.lower() not in ("", "identity"):
                raise RequestError(
                    f"the body is encoded as {shown(encoding)}; send it without content-encoding",
                    code="unsupported_encoding",
                )
            length = Headers(scope=scope).get("content-length", "")
            if length.isdecimal():
                self._check(int(length), "")
            receive = self._limit_body(receive)
        await self._app(scope, receive, send)

    def _limit_body(self, receive: Receive) -> Receive:
        """Return ``receive`` with a byte count, for chunked bodies, whose length is not known in advance."""
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            self._check(received, " so far")
            return message

        return receive_limited

    def _check(self, size: int, so_far: str) -> None:
        if size > self._max_body_bytes:
            raise RequestError(
                f"the body has {size} bytes{so_far}, at most {self._max_body_bytes} are allowed; send fewer or "
                "shorter documents",
                code="body_too_large",
            )


class ObservedRequests:
    """ASGI middleware, the outermost one of the app; it sends errors that were raised outside of a route.

    Args:
        routes: The routes of the app, for requests that are rejected before they reach one.
        dialects: The API format of each endpoint.
        tracer: Starts the span of each request except probes; None starts none.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        routes: Sequence[BaseRoute],
        dialects: Mapping[Callable[..., Any], str],
        form_of: FormOf,
        tracer: Tracer | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._dialects = dialects
        self._tracer = tracer
        self._form_of = form_of
        self._identifiers = Identifiers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get("x-request-id", "")
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else self._identifiers.new()
        fields = scope.setdefault("state", {})["log_fields"] = LogFields()
        token = REQUEST_ID.set(request_id)
        try:
            tracer = None if get_route_path(scope) in _QUIET else self._tracer
            with request_span(tracer, scope, request_id) as span:
                await self._observe(scope, receive, send, request_id, fields, span)
        finally:
            REQUEST_ID.reset(token)

    async def _observe(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, fields: LogFields, span: RequestSpan
    ) -> None:
        started = time.perf_counter()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            fields.error = spec_of(error).code
            if status is None:
                await error_response(error, self._form_of(get_route_path(scope)))(scope, receive, send_with_id)
            else:  # the server closes the connection of a response that was left incomplete
                log_failure(error)
        finally:
            seconds = time.perf_counter() - started
            self._finish(scope, request_id, 499 if status is None else status, seconds, fields, span)

    def _finish(
        self, scope: Scope, request_id: str, status: int, seconds: float, fields: LogFields, span: RequestSpan
    ) -> None:
        if "route" not in scope:  # rejected before it was routed: for its key, its quota, its body
            scope["route"] = next((route for route in self._routes if route.matches(scope)[0] is Match.FULL), None)
        path = getattr(scope["route"], "path", None)
        if status == 200 and get_route_path(scope) == "/openapi.json":  # its route is not in the scope
            path = "/openapi.json"
        route = path or "unmatched"
        unexplained = "ok" if status < 400 else "client_closed_request" if status == 499 else "internal_error"
        code = fields.error or unexplained
        span.finish(path, status, code, fields.tenant)
        self._metrics.count_request(route, status, seconds, self._dialect(scope, status), code, fields.tenant)
        line = {
            "request_id": request_id,
            "method": scope["method"] if route != "unmatched" else "-",
            "route": route,
            "status": status,
            "seconds": round(seconds, 6),
            **span.ids(),
            **fields.to_dict(),
        }
        level = logging.DEBUG if route in _QUIET and status < 400 else logging.INFO
        _access.log(level, "request", extra={"fields": line})

    def _dialect(self, scope: Scope, status: int) -> str:
        """Return the API format of the response: of its route, or of its error if no route was reached."""
        endpoint = getattr(scope.get("route"), "endpoint", None)
        if endpoint is None and status not in (404, 405):
            return self._form_of(get_route_path(scope)).dialect
        return self._dialects.get(endpoint, _NO_DIALECT) if endpoint is not None else _NO_DIALECT
