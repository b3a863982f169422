"""Descriptions of the error statuses of routes, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

__all__ = ["ANSWERING", "SCORING", "STREAMED", "documented"]

ANSWERING = (400, 401, 403, 404, 413, 422, 429, 500, 502, 503, 504)
"""Error statuses of routes that answer a question."""
SCORING = (400, 401, 403, 413, 422, 429, 500, 503)
"""Error statuses of routes that score documents."""

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "object", "description": "A server-sent event."}}}}
}
"""The entry for ``responses=`` of a route that streams."""

_DESCRIPTIONS = {
    400: "The request asks for something that is not allowed or not served.",
    401: "The API key is missing or wrong.",
    403: "The API key does not allow this.",
    404: "The model is not served, or what the path names does not exist.",
    409: "It exists already.",
    413: "The request is too large.",
    422: "The body has the wrong shape.",
    429: "There is no capacity now; see the header retry-after.",
    500: "The service failed.",
    502: "The server of a remote model failed.",
    503: "The model is not loaded.",
    504: "The answer took too long.",
}


def documented(body: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the entries for ``responses=`` of a route.

    Args:
        body: The error body of the dialect.
        statuses: The error statuses of the route.
    """
    return {status: {"model": body, "description": _DESCRIPTIONS[status]} for status in statuses}
