"""Connections: limits that hold before any key is checked: head size, queued requests, time to send and to read.

uvicorn's parser of HTTP/1.1 takes a request line and headers of any length, queues every request that a client sends
ahead, takes trailers for headers, and waits for the rest of a request, and for the reader of a response, for ever.
``BoundedConnection`` adds the limits and leaves everything else to uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rag_posfix_api.http.errors import ErrorForm, RequestError, problem_of
from rag_posfix_api.http.middleware import encode_json

_log = logging.getLogger("rag_posfix_api.access")

MAX_QUEUED: Final = 16
"""Requests of one connection that wait for the response to an earlier one; further bytes are not parsed."""
MAX_HEAD_BYTES: Final = 32 * 1024
"""Size limit of request line and headers together; beyond it the answer is 431."""
_MIN_REQUEST_BYTES = 9
"""A shortest request, ``GET /`` and two line ends."""


class BoundedConnection(HttpToolsProtocol):
    """A connection with limits; ``limited`` sets them.

    Attributes:
        read_seconds: How long a client may take to send a request, its body included; afterwards the answer is 408.
            As long it may read nothing of a response; afterwards the connection is closed.
        form: Renders the body of both errors.
    """

    read_seconds: float
    form: ErrorForm

    @classmethod
    def limited(cls, read_seconds: float, form: ErrorForm) -> type[BoundedConnection]:
        """Return the class of a server's connections."""
        return type("LimitedConnection", (cls,), {"read_seconds": read_seconds, "form": form})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0  # as parsed; names and values that are not complete yet are not counted
        self._unparsed_bytes = 0  # since the last complete head
        self._in_head = True
        self._rejected = False
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._held = b""  # received behind the last request that may be queued; at most one read of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _QueueFlow(transport, self)
        # pause_writing: anything at all is unread. Transports with TLS pause at a limit of 0 for ever.
        transport.set_write_buffer_limits(high=1, low=0)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_unread_timer()
        self._held = b""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse ``data`` until ``MAX_QUEUED`` requests wait; the rest is held until none does."""
        start = 0
        while start < len(data) and not self._rejected and not self.transport.is_closing():
            free = MAX_QUEUED - len(self.pipeline)
            if free <= 0:
                self._held = data[start:]
                self.flow.pause_reading()
                return
            stop = len(data)
            if data.count(b"\n", start) > free:  # the end of each head is a line end: it could be of more requests
                stop = start + max(_MIN_REQUEST_BYTES * (free - 1), 1)
            self._parse(data[start:stop])
            start = stop

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > MAX_HEAD_BYTES + len(data):
                self._reject_head()

    @property
    def has_queue(self) -> bool:
        """Whether requests, or bytes of them, wait for the response to an earlier one."""
        return bool(self.pipeline or self._held)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held and not self.pipeline and not self.transport.is_closing():
            held, self._held = self._held, b""
            self.data_received(held)
            self.flow.resume_reading()  # unless requests wait again

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_unread_timer()
        super().resume_writing()

    def _watch_unread(self, unread_bytes: int) -> None:
        """Close the connection if its client reads nothing of ``unread_bytes`` within ``read_seconds``."""

        def check() -> None:
            still_unread = self.transport.get_write_buffer_size()
            if still_unread < unread_bytes:
                self._watch_unread(still_unread)
            else:
                self.transport.abort()

        self._unread_timer = self.loop.call_later(self.read_seconds, check)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._unparsed_bytes = True, 0, 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers come after the body: nobody has checked them, and they replace no header
            super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if not self._rejected:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._rejected:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        if not self._rejected:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._rejected:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._reject_head()

    def _reject_head(self) -> None:
        size = max(self._head_bytes, self._unparsed_bytes)
        self._reject(
            f"request line and headers have {size} bytes so far, at most {MAX_HEAD_BYTES} are allowed",
            "head_too_large",
        )

    def _late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.has_queue:  # the rest of the request is not read yet
            self._start_timer()
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
            return
        self._reject(
            f"the request was not complete after {self.read_seconds:g} seconds; send it faster", "request_timeout"
        )

    def _reject(self, message: str, code: str) -> None:
        """Answer once, without the application, and close the connection."""
        if self._rejected:
            return
        self._rejected = True
        self._stop_timer()
        problem = problem_of(RequestError(message, code=code))
        body, status = encode_json(self.form(problem)), problem.status
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
            self._timer = self.loop.call_later(self.read_seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _QueueFlow(FlowControl):
    """Reading goes on when no request waits; uvicorn resumes it after each response, and for each body."""

    def __init__(self, transport: asyncio.Transport, connection: BoundedConnection) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.has_queue:
            super().resume_reading()
