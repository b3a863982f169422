"""Errors in the format of OpenAI's API: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rag_posfix_api.dialects.statuses import documented
from rag_posfix_api.http.errors import Problem

__all__ = ["ErrorBody", "ErrorDetail", "errors", "render_error"]


class ErrorDetail(BaseModel):
    """The error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


def render_error(problem: Problem) -> dict[str, Any]:
    """Return the error body of ``problem``."""
    detail = ErrorDetail(message=problem.message, type=problem.type, param=problem.param, code=problem.code)
    return ErrorBody(error=detail).model_dump()


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the entries for ``responses=`` of a route with these error statuses."""
    return documented(ErrorBody, *statuses)
