"""A request id on every response; a count, a span and a log line for every request.

Counts and log lines contain no text of a client or a model: no prompt, passage, answer or unknown path.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_posfix_api.http.errors import ErrorRenderers, code_of, error_response, kind_of, log_failure
from rag_posfix_api.http.facts import Facts
from rag_posfix_api.http.identifiers import Identifiers
from rag_posfix_api.http.logs import REQUEST_ID
from rag_posfix_api.http.metrics import Metrics
from rag_posfix_api.http.tracing import UNTRACED_REQUESTS, RequestSpan, RequestTracer

_access = logging.getLogger("rag_posfix_api.access")

# Goes into logs and headers as it came, so nothing but plain ids.
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_NO_DIALECT = "none"
_QUIET = frozenset({"/livez", "/readyz", "/healthz", "/health", "/metrics"})


class ObservedRequests:
    """ASGI middleware, the outermost one of the app; it also turns an uncaught error into status 500.

    Args:
        dialects: The wire format of each endpoint.
        tracer: Starts the span of each request but those of probes.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        dialects: Mapping[Callable[..., Any], str],
        renderers: ErrorRenderers,
        tracer: RequestTracer = UNTRACED_REQUESTS,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._dialects = dialects
        self._tracer = tracer
        self._renderers = renderers
        self._identifiers = Identifiers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else self._identifiers.new()
        facts = Facts()
        scope.setdefault("state", {})["facts"] = facts
        tracer = UNTRACED_REQUESTS if scope["path"] in _QUIET else self._tracer
        token = REQUEST_ID.set(request_id)
        try:
            with tracer.request(scope, request_id) as span:
                await self._observed(scope, receive, send, request_id, facts, span)
        finally:
            REQUEST_ID.reset(token)

    async def _observed(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, facts: Facts, span: RequestSpan
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
            facts.error = kind_of(error).code
            if status is None:
                await error_response(error, self._renderers.of(scope["path"]))(scope, receive, send_with_id)
            else:  # the server closes the connection of a response that was left incomplete
                log_failure(error)
        finally:
            seconds = time.perf_counter() - started
            self._finish(scope, request_id, 499 if status is None else status, seconds, facts, span)

    def _finish(
        self, scope: Scope, request_id: str, status: int, seconds: float, facts: Facts, span: RequestSpan
    ) -> None:
        found = getattr(scope.get("route"), "path", None)
        route = found or "unmatched"
        code = facts.error or code_of(status)
        span.finished(found, status, code)
        self._metrics.request(route, status, seconds, self._dialect(scope, status), code)
        fields = {
            "request_id": request_id,
            "method": scope["method"] if route != "unmatched" else "-",
            "route": route,
            "status": status,
            "seconds": round(seconds, 6),
            **span.ids(),
            **facts.to_dict(),
        }
        level = logging.DEBUG if route in _QUIET and status < 400 else logging.INFO
        _access.log(level, "request", extra={"fields": fields})

    def _dialect(self, scope: Scope, status: int) -> str:
        """Return the wire format of the response: that of its route, or of its error if none was reached."""
        endpoint = getattr(scope.get("route"), "endpoint", None)
        if endpoint is None and status in (404, 405):
            return _NO_DIALECT
        if endpoint is None:
            return self._renderers.of(scope["path"]).dialect
        return self._dialects.get(endpoint, _NO_DIALECT)
