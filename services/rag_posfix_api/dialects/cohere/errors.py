"""Errors in the format of Cohere's API: ``{"message"}``, with the service's own code beside it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rag_posfix_api.dialects.statuses import documented
from rag_posfix_api.http.errors import Problem

__all__ = ["CohereErrorBody", "errors", "render_error"]


class CohereErrorBody(BaseModel):
    """The body of every error."""

    message: str
    code: str
    param: str | None


def render_error(problem: Problem) -> dict[str, Any]:
    """Return the error body of ``problem``."""
    return CohereErrorBody(message=problem.message, code=problem.code, param=problem.param).model_dump()


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the entries for ``responses=`` of a route with these error statuses."""
    return documented(CohereErrorBody, *statuses)
