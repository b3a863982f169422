"""The header ``Host`` of a service on loopback without a key: pages of other sites must not reach it.

A page can resolve its own name to 127.0.0.1 and then send requests to local services from a user's browser ("DNS
rebinding"). Such requests carry the name of the page in ``Host``.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rag_posfix_api.http.errors import ErrorRenderers, ForbiddenHostError, error_response, kind_of

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class AllowedHosts:
    """ASGI middleware that refuses requests to other names with 403. A request without the header passes.

    Args:
        names: The names that are allowed, without a port.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], renderers: ErrorRenderers) -> None:
        self._app = app
        self._names = frozenset(names)
        self._renderers = renderers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if not host or _without_port(host) in self._names:
            await self._app(scope, receive, send)
            return
        refusal = ForbiddenHostError(
            "this service is bound to loopback without a key, and takes requests to localhost only; call it by "
            "'localhost' or 127.0.0.1, or set RAG_POSFIX_SERVICE_API_KEY"
        )
        scope["state"]["facts"].error = kind_of(refusal).code
        await error_response(refusal, self._renderers.of(scope["path"]))(scope, receive, send)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).lower()
