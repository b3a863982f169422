"""Errors in the format of Text Embeddings Inference: ``{"error": text, "error_type": class}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from rag_posfix_api.dialects.statuses import documented
from rag_posfix_api.http.errors import Problem

__all__ = ["TeiErrorBody", "errors", "render_error"]

_TYPES: Mapping[int, str] = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Backend"}


class TeiErrorBody(BaseModel):
    """The body of every error."""

    error: str
    error_type: str


def render_error(problem: Problem) -> dict[str, Any]:
    """Return the error body of ``problem``."""
    return TeiErrorBody(error=problem.message, error_type=_TYPES.get(problem.status, "Validation")).model_dump()


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the entries for ``responses=`` of a route with these error statuses."""
    return documented(TeiErrorBody, *statuses)
