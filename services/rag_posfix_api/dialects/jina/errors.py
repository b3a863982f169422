"""Errors of the rerank route: ``detail``, which Jina's clients show, and the service's own ``error`` object."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rag_posfix_api.dialects.statuses import documented
from rag_posfix_api.http.errors import Problem

__all__ = ["RerankErrorBody", "RerankErrorDetail", "errors", "render_error"]


class RerankErrorDetail(BaseModel):
    """The error, for programs."""

    message: str
    type: str
    param: str | None
    code: str


class RerankErrorBody(BaseModel):
    """The body of every error."""

    detail: str
    error: RerankErrorDetail


def render_error(problem: Problem) -> dict[str, Any]:
    """Return the error body of ``problem``."""
    error = RerankErrorDetail(message=problem.message, type=problem.type, param=problem.param, code=problem.code)
    return RerankErrorBody(detail=problem.message, error=error).model_dump()


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the entries for ``responses=`` of a route with these error statuses."""
    return documented(RerankErrorBody, *statuses)
