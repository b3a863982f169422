"""Refuses requests before anything reads them: a missing API key, a body that is too large."""

from __future__ import annotations

import hmac

from fastapi import HTTPException
from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rag_posfix.errors import RagPosfixError
from services.api.errors import TooLargeError, UnauthorizedError, error_response, kind_of

__all__ = ["OPEN_PATHS", "Guard"]

OPEN_PATHS = frozenset({"/livez", "/readyz", "/healthz", "/health", "/metrics"})
"""What orchestrators ask without a key."""


class Guard:
    """ASGI middleware.

    Args:
        app: What it guards.
        api_key: What requests must bring; None lets everybody in.
        max_body_bytes: Largest body.
    """

    def __init__(self, app: ASGIApp, api_key: SecretStr | None, max_body_bytes: int) -> None:
        self._app = app
        self._expected = None if api_key is None else b"bearer " + api_key.get_secret_value().encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, self._bounded(receive), send)
            return
        scope["state"]["facts"].error = kind_of(refusal).code
        await error_response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> RagPosfixError | None:
        headers = Headers(scope=scope)
        if self._expected is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = f"{scheme.lower()} {key.strip()}".encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                what = "wrong" if key else "missing"
                return UnauthorizedError(f"the API key is {what}; send it as 'Authorization: Bearer KEY'")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return TooLargeError(self._too_large(f"has {length} bytes"))
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """Return ``receive`` with a count: a chunked body does not tell its length in advance."""
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                # FastAPI lets through this class alone while it reads a body.
                raise HTTPException(413, self._too_large(f"has more than {self._max_body_bytes} bytes"))
            return message

        return bounded

    def _too_large(self, what: str) -> str:
        return f"the body {what}, at most {self._max_body_bytes} are allowed; send fewer or shorter documents"
