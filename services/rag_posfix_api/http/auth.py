"""API keys: requests without a valid key are refused before their body is read."""

from __future__ import annotations

import hmac

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rag_posfix_api.http.errors import ErrorRenderers, UnauthorizedError, error_response, kind_of

__all__ = ["OPEN_FOLDERS", "OPEN_PATHS", "ApiKeyAuth"]

OPEN_PATHS = frozenset({"/livez", "/readyz", "/healthz", "/health", "/metrics", "/"})
"""What orchestrators ask without a key, and the page, which asks for the key."""
OPEN_FOLDERS = ("/page/",)
"""The files of the page."""


class ApiKeyAuth:
    """ASGI middleware that checks the API key.

    Args:
        app: The wrapped application.
        api_key: The key of requests, as ``Authorization: Bearer`` or ``x-api-key``; None turns the check off.
        renderers: Renders the error in the dialect of the path.
    """

    def __init__(self, app: ASGIApp, api_key: SecretStr | None, renderers: ErrorRenderers) -> None:
        self._app = app
        self._expected = None if api_key is None else b"bearer " + api_key.get_secret_value().encode()
        self._renderers = renderers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        scope["state"]["facts"].error = kind_of(refusal).code
        await error_response(refusal, self._renderers.of(scope["path"]))(scope, receive, send)

    def _refusal(self, scope: Scope) -> UnauthorizedError | None:
        if self._expected is None or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDERS):
            return None
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not scheme:  # Anthropic's clients
            scheme, key = "bearer", headers.get("x-api-key", "")
        given = f"{scheme.lower()} {key.strip()}".encode("latin-1")
        if hmac.compare_digest(given, self._expected):
            return None
        what = "wrong" if key else "missing"
        return UnauthorizedError(f"the API key is {what}; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
