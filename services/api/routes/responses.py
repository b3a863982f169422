"""The errors that routes document."""

from __future__ import annotations

from typing import Any

from services.api.schemas.common import ErrorBody

__all__ = ["errors"]

_DESCRIPTIONS = {
    400: "The request asks for something that is not allowed or not served.",
    401: "The API key is missing or wrong.",
    404: "The model is not served.",
    413: "The prompt or the request is too long.",
    422: "The body has the wrong shape.",
    429: "There is no capacity now; see the header retry-after.",
    500: "The service failed.",
    503: "The model is not loaded.",
    504: "The answer took too long.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the entries for ``responses=`` of a route.

    Args:
        statuses: The statuses that it may answer with.
    """
    return {status: {"model": ErrorBody, "description": _DESCRIPTIONS[status]} for status in statuses}
