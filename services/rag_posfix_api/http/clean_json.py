"""Request bodies without lone surrogates: JSON escapes can contain them, but UTF-8 cannot encode them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from rag_posfix.text import clean_text

__all__ = ["CleanRoute"]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class _CleanRequest(Request):
    async def json(self) -> Any:
        """Return the body; each lone surrogate in it becomes U+FFFD, in names as well as in values."""
        body = await self.body()
        value = json.loads(body)
        if _SURROGATE.search(body) is None:  # a surrogate comes in as an escape or not at all
            return value
        return json.loads(clean_text(json.dumps(value, ensure_ascii=False)))


class CleanRoute(APIRoute):
    """A route whose request body has no lone surrogates."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler."""
        handler = super().get_route_handler()

        async def clean(request: Request) -> Response:
            return await handler(_CleanRequest(request.scope, request.receive))

        return clean
