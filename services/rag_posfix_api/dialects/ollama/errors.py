"""Errors in the format of Ollama's API: ``{"error": text}``."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rag_posfix_api.dialects.statuses import documented
from rag_posfix_api.http.errors import Problem

__all__ = ["OllamaErrorBody", "errors", "render_error"]


class OllamaErrorBody(BaseModel):
    """The body of every error."""

    error: str


def render_error(problem: Problem) -> dict[str, Any]:
    """Return the error body of ``problem``."""
    return OllamaErrorBody(error=problem.message).model_dump()


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the entries for ``responses=`` of a route with these error statuses."""
    return documented(OllamaErrorBody, *statuses)
