"""Request bodies of bounded shape and without lone surrogates: JSON can escape them, but UTF-8 cannot encode them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from rag_posfix.errors import GenerationCancelled
from rag_posfix_api.http.body_shape import check_lists, check_shape

_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _CleanRequest(Request):
    async def json(self) -> Any:
        """Return the body; each lone surrogate in it becomes U+FFFD, in names as well as in values."""
        if not hasattr(self, "_json"):
            self._json = _parsed(await self.body())
        return self._json


class CleanRoute(APIRoute):
    """A route whose request body has a bounded shape and no lone surrogates."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler."""
        handler = super().get_route_handler()

        async def clean(request: Request) -> Response:
            checked = _CleanRequest(request.scope, request.receive)
            try:
                check_shape(await checked.body())
            except ClientDisconnect as gone:
                raise GenerationCancelled("the client went away before its request was complete") from gone
            await _check_parsed(checked)
            return await handler(checked)

        return clean


async def _check_parsed(request: _CleanRequest) -> None:
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        return  # reported when the route reads the body
    check_lists(body, request.app.state.service.limits.max_documents)


def _parsed(body: bytes) -> Any:
    value = json.loads(body)
    if _MAYBE_SURROGATE.search(body) is None:
        return value
    # The parser has joined the pairs: what is left stands alone.
    return json.loads(_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
