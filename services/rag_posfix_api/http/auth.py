"""API keys: requests that no valid key allows are refused before their body is read."""

from __future__ import annotations

from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rag_posfix.errors import RagPosfixError
from rag_posfix_api.http.errors import ErrorRenderers, ForbiddenError, UnauthorizedError, error_response, kind_of
from rag_posfix_api.keys.check import KeyChecker
from rag_posfix_api.keys.quotas import Quotas
from rag_posfix_api.keys.records import ANONYMOUS, CALLER, Caller
from rag_posfix_api.keys.scopes import required_scope

__all__ = ["OPEN_FOLDERS", "OPEN_PATHS", "ApiKeyAuth"]

OPEN_PATHS = frozenset({"/livez", "/readyz", "/healthz", "/health", "/metrics", "/"})
"""What orchestrators ask without a key, and the page, which asks for the key."""
OPEN_FOLDERS = ("/page/",)
"""The files of the page."""


class ApiKeyAuth:
    """ASGI middleware that tells the caller from the API key, checks its scope and counts its requests.

    The caller is then in ``keys.records.CALLER``.

    Args:
        app: The wrapped application.
        checker: Checks keys, sent as ``Authorization: Bearer`` or ``x-api-key``.
        quotas: Counts requests by key.
        renderers: Renders the error in the dialect of the path.
    """

    def __init__(self, app: ASGIApp, checker: KeyChecker, quotas: Quotas, renderers: ErrorRenderers) -> None:
        self._app = app
        self._checker = checker
        self._quotas = quotas
        self._renderers = renderers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDERS):
            await self._app(scope, receive, send)
            return
        facts = scope["state"]["facts"]
        with ExitStack() as counted:
            try:
                caller = await self._allowed(scope)
                facts.key = caller.key_id
                counted.enter_context(self._quotas.running(caller))
            except RagPosfixError as refusal:
                facts.error = kind_of(refusal).code
                await error_response(refusal, self._renderers.of(scope["path"]))(scope, receive, send)
                return
            token = CALLER.set(caller)
            try:
                await self._app(scope, receive, send)
            finally:
                CALLER.reset(token)

    async def _allowed(self, scope: Scope) -> Caller:
        """Return the caller.

        Raises:
            UnauthorizedError: the key is missing or wrong.
            ForbiddenError: the key has not the scope of the request.
            OverloadedError: too many keys are being checked.
        """
        needed = required_scope(scope["method"], scope["path"])
        if not self._checker.required:
            if needed in ANONYMOUS.scopes:
                return ANONYMOUS
            raise ForbiddenError("this needs a key with the scope 'admin', and none exists; create one on the server")
        presented = _presented(Headers(scope=scope))
        caller = None if presented is None else await self._checker.caller(presented)
        if caller is None:
            what = "missing" if presented is None else "wrong"
            raise UnauthorizedError(
                f"the API key is {what}; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
        if needed not in caller.scopes:
            raise ForbiddenError(f"this key has not the scope {needed!r} that the request needs; use another key")
        return caller


def _presented(headers: Headers) -> bytes | None:
    """Return the key of a request; None without one, "" for headers that are no key or contradict each other."""
    authorizations, keys = headers.getlist("authorization"), headers.getlist("x-api-key")
    if len(authorizations) > 1 or len(keys) > 1:  # a proxy may have checked the other one
        return b""
    if authorizations and authorizations[0]:
        scheme, _, key = authorizations[0].partition(" ")
        return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
    return keys[0].strip().encode("latin-1") or None if keys else None  # Anthropic's clients
