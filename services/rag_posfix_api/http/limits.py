"""Limits that are checked before a request is parsed: the size of the body."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_posfix_api.http.errors import BodyTooLargeError, ErrorRenderers, error_response, kind_of


class BodyLimit:
    """ASGI middleware that limits the size of request bodies."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, renderers: ErrorRenderers) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._renderers = renderers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if not length.isdecimal() or int(length) <= self._max_body_bytes:
            await self._app(scope, self._bounded(receive), send)
            return
        refusal = BodyTooLargeError(self._too_large(f"has {length} bytes"))
        scope["state"]["facts"].error = kind_of(refusal).code
        await error_response(refusal, self._renderers.of(scope["path"]))(scope, receive, send)

    def _bounded(self, receive: Receive) -> Receive:
        """Return ``receive`` with a byte count, for chunked bodies, whose length is not known in advance."""
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                # FastAPI lets through this class alone while it reads a body.
                raise HTTPException(413, self._too_large(f"has {received} bytes so far"))
            return message

        return bounded

    def _too_large(self, what: str) -> str:
        return f"the body {what}, at most {self._max_body_bytes} are allowed; send fewer or shorter documents"
