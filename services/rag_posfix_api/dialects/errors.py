"""Errors of each API format: a table of bodies."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from rag_posfix_api.http.errors import INVALID, ErrorForm, Problem

ANSWERING = (400, 401, 403, 404, 413, 422, 429, 500, 502, 503, 504)
"""Error statuses of routes that answer a question."""
SCORING = (400, 401, 403, 413, 422, 429, 500, 503)
"""Error statuses of routes that score documents."""


class ErrorDetail(BaseModel):
    """The error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


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


class CohereErrorBody(BaseModel):
    """The body of every error."""

    message: str
    code: str
    param: str | None


class OllamaErrorBody(BaseModel):
    """The body of every error."""

    error: str


class RerankErrorDetail(ErrorDetail):
    """The error, for programs."""


class RerankErrorBody(BaseModel):
    """The body of every error."""

    detail: str
    error: RerankErrorDetail


class TeiErrorBody(BaseModel):
    """The body of every error."""

    error: str
    error_type: str


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TEI_TYPES = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Backend"}


def _detail(problem: Problem) -> dict[str, Any]:
    return {"message": problem.message, "type": problem.type, "param": problem.param, "code": problem.code}


def _anthropic(problem: Problem) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(problem.status, INVALID if problem.status < 500 else "api_error")
    return {"error": _detail(problem) | {"type": kind}}


OPENAI = ErrorForm("openai", ErrorBody, lambda problem: {"error": _detail(problem)})
ANTHROPIC = ErrorForm("anthropic", AnthropicErrorBody, _anthropic)
COHERE = ErrorForm("cohere", CohereErrorBody, _detail)
OLLAMA = ErrorForm("ollama", OllamaErrorBody, lambda problem: {"error": problem.message})
JINA = ErrorForm("jina", RerankErrorBody, lambda problem: {"detail": problem.message, "error": _detail(problem)})
"""Jina's clients show ``detail``."""
TEI = ErrorForm(
    "tei",
    TeiErrorBody,
    lambda problem: {"error": problem.message, "error_type": _TEI_TYPES.get(problem.status, "Validation")},
)
