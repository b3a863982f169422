"""The span of an HTTP request. It carries no text of a client: no unknown path, query, header or body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.types import Scope

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
