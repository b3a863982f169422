"""What surrounds every route: host names, API keys, body size, error responses, request ids, counts, spans, log lines.

The middlewares raise what they reject; ``ObservedRequests``, the outermost one, sends the error. Counts and log lines
contain no text of a client or a model: no prompt, passage, answer or unknown path.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette._utils import get_route_path  # what routes are chosen by: behind a prefix it is not the whole path
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_posfix.errors import RagPosfixError
from rag_posfix.parameters import shown
from rag_posfix_api.http.auth import CALLER, KeyChecker, Rejections, source_of
from rag_posfix_api.http.errors import (
    INVALID,
    SERVER,
    BodyTooLargeError,
    EncodedBodyError,
    ErrorForm,
    ForbiddenHostError,
    Problem,
    UnauthorizedError,
    kind_of,
    log_failure,
    one_line,
    problem_of,
)
from rag_posfix_api.http.json_bodies import SafeJSONResponse
from rag_posfix_api.http.logs import REQUEST_ID, Identifiers, LogFields
from rag_posfix_api.http.metrics import Metrics
from rag_posfix_api.http.quotas import Quotas

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from opentelemetry.trace import Tracer as Tracer

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
        request.state.log_fields.error = kind_of(error).code
        return error_response(error, form_of(get_route_path(request.scope)))

    async def handle_routing(request: Request, error: Any) -> Response:
        status, message, headers = error.status_code, str(error.detail), error.headers
        path = get_route_path(request.scope)
        code = "invalid_request" if status < 500 else "internal_error"
        if status == 404:
            code = "not_found"
            message = f"nothing is served at {request.method} {path!r}; GET /openapi.json lists what is"
        elif status == 405:
            code = "method_not_allowed"
            message = f"{path!r} does not take {request.method}; the header 'allow' says what it takes"
            headers = {"allow": ", ".join(_allowed_methods(request))}
        request.state.log_fields.error = code
        problem = Problem(status, INVALID if status < 500 else SERVER, code, one_line(message))
        return SafeJSONResponse(form_of(path)(problem), status, headers)

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
            raise ForbiddenHostError(
                "this service is bound to loopback without a key, and takes requests to localhost only; call it by "
                "'localhost' or 127.0.0.1, or set RAG_POSFIX_SERVICE_API_KEY"
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
        except UnauthorizedError:
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
                raise EncodedBodyError(f"the body is encoded as {shown(encoding)}; send it without content-encoding")
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
            raise BodyTooLargeError(
                f"the body has {size} bytes{so_far}, at most {self._max_body_bytes} are allowed; send fewer or "
                "shorter documents"
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
            fields.error = kind_of(error).code
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
