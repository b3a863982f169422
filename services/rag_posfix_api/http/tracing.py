"""The span of an HTTP request, or none. It carries no text of a client: no unknown path, query, header or body."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from starlette.types import Scope

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_CLOSED = 499
"""The client left before there was a response: this status was never sent."""


class RequestSpan(Protocol):
    """The span of one request."""

    def finished(self, route: str | None, status: int, code: str) -> None:
        """Receive the outcome.

        Args:
            route: The template of the path, or None if no route was reached.
            code: ``ok``, or the code of the error.
        """
        ...

    def ids(self) -> Mapping[str, str]:
        """Return the ids of trace and span for the log."""
        ...


class RequestTracer(Protocol):
    """Starts the spans of requests."""

    def request(self, scope: Scope, request_id: str) -> AbstractContextManager[RequestSpan]:
        """Return the context manager of a request. Its span is the current one, in worker threads too."""
        ...


class _Untraced:
    def request(self, scope: Scope, request_id: str) -> _Untraced:
        return self

    def __enter__(self) -> _Untraced:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do nothing."""

    def finished(self, route: str | None, status: int, code: str) -> None:
        """Ignore it."""

    def ids(self) -> Mapping[str, str]:
        return {}


UNTRACED_REQUESTS: RequestTracer = _Untraced()
"""Starts no spans."""


def request_tracer(provider: TracerProvider | None) -> RequestTracer:
    """Return a tracer of requests; one that does nothing without a provider."""
    return UNTRACED_REQUESTS if provider is None else _OpenTelemetryRequests(provider)


class _OpenTelemetryRequests:
    """Starts a server span for each request. Its parent is that of the header ``traceparent``.

    Other formats of that header are read if ``OTEL_PROPAGATORS`` names them.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import propagate

        self._tracer = provider.get_tracer("rag_posfix_api")
        self._extract = propagate.extract

    def request(self, scope: Scope, request_id: str) -> _ServerSpan:
        from opentelemetry.trace import SpanKind

        carrier: dict[str, str] = {}
        for name, value in scope["headers"]:
            carrier.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        span = self._tracer.start_span(
            method if method in _METHODS else "HTTP",
            self._extract(carrier),
            SpanKind.SERVER,
            {
                "http.request.method": method,
                "url.scheme": scope.get("scheme", "http"),
                "rag_posfix.request_id": request_id,
            },
        )
        return _ServerSpan(span, method)


class _ServerSpan:
    def __init__(self, span: Span, method: str) -> None:
        self._span = span
        self._method = method
        self._token: Token[Context] | None = None

    def __enter__(self) -> _ServerSpan:
        from opentelemetry import context, trace

        self._token = context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        from opentelemetry import context

        if self._token is not None:
            context.detach(self._token)
        self._span.end()

    def finished(self, route: str | None, status: int, code: str) -> None:
        """Set name, status and error of the span."""
        from opentelemetry.trace import StatusCode

        if route is not None:
            self._span.update_name(f"{self._method} {route}")
            self._span.set_attribute("http.route", route)
        if status != _CLOSED:
            self._span.set_attribute("http.response.status_code", status)
        if code != "ok":
            self._span.set_attribute("error.type", code)
        # A stream that failed has the status 200. What a client did wrong, or did not wait for, is no failure here.
        if status >= 500 or (status < 400 and code not in ("ok", "client_closed_request")):
            self._span.set_status(StatusCode.ERROR)

    def ids(self) -> Mapping[str, str]:
        """Return the ids in hexadecimal, as other programs show them."""
        context = self._span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
