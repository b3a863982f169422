"""Errors in the format of Anthropic's API: ``{"type": "error", "error": {"type", "message"}}``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from rag_posfix_api.dialects.statuses import documented
from rag_posfix_api.http.errors import Problem

__all__ = ["AnthropicErrorBody", "AnthropicErrorDetail", "errors", "render_error"]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetail(BaseModel):
    """The error; ``code`` and ``param`` are this service's own."""

    type: str
    message: str
    code: str
    param: str | None


class AnthropicErrorBody(BaseModel):
    """The body of every error."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail


def render_error(problem: Problem) -> dict[str, Any]:
    """Return the error body of ``problem``."""
    kind = _TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    detail = AnthropicErrorDetail(type=kind, message=problem.message, code=problem.code, param=problem.param)
    return AnthropicErrorBody(error=detail).model_dump()


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the entries for ``responses=`` of a route with these error statuses."""
    return documented(AnthropicErrorBody, *statuses)
