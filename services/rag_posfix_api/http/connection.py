"""Limits of a connection, which hold before any key is checked: size of the head, and time to send a request.

uvicorn's parser of HTTP/1.1 takes a request line and headers of any length, and waits for the rest of a request for
ever. The class here adds both limits and leaves everything else to uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rag_posfix_api.http.encoding import encode_json
from rag_posfix_api.http.errors import Problem

_log = logging.getLogger("rag_posfix_api.access")


def bounded_connection(
    max_head_bytes: int, read_seconds: float, render: Callable[[Problem], Mapping[str, Any]]
) -> type[asyncio.Protocol]:
    """Return the class of a server's connections.

    Args:
        max_head_bytes: Size limit of request line and headers together; beyond it the answer is 431.
        read_seconds: How long a client may take to send a request, its body included; afterwards the answer is 408.
        render: Renders the body of both errors.
    """

    class BoundedConnection(_BoundedConnection):
        """A connection with the limits above."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.set_limits(max_head_bytes, read_seconds, render)

    return BoundedConnection


class _BoundedConnection(HttpToolsProtocol):
    def set_limits(
        self, max_head_bytes: int, read_seconds: float, render: Callable[[Problem], Mapping[str, Any]]
    ) -> None:
        self._max_head_bytes = max_head_bytes
        self._read_seconds = read_seconds
        self._render = render
        self._head_bytes = 0  # as parsed; names and values that are not complete yet are not counted
        self._unparsed_bytes = 0  # since the last complete head
        self._in_head = True
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_head:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > self._max_head_bytes + len(data):
                self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._unparsed_bytes = True, 0, 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._max_head_bytes:
            self._refuse_head()

    def _refuse_head(self) -> None:
        most = self._max_head_bytes
        seen = max(self._head_bytes, self._unparsed_bytes)
        self._refuse(
            431, "head_too_large", f"request line and headers have {seen} bytes so far, at most {most} are allowed"
        )

    def _late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
            return
        limit = self._read_seconds
        self._refuse(408, "request_timeout", f"the request was not complete after {limit:g} seconds; send it faster")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer once, without the application, and close the connection."""
        if self._refused:
            return
        self._refused = True
        self._stop_timer()
        body = encode_json(self._render(Problem(status, "invalid_request_error", code, message)))
        lines = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            "\r\n",
        )
        self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()
        _log.info("request", extra={"fields": {"route": "unmatched", "status": status, "error": code}})

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._read_seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
