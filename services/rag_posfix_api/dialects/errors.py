"""Errors of each wire format: a table of bodies, and what the OpenAPI document says of their statuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from rag_posfix_api.http.errors import Problem

ANSWERING = (400, 401, 403, 404, 413, 422, 429, 500, 502, 503, 504)
"""Error statuses of routes that answer a question."""
SCORING = (400, 401, 403, 413, 422, 429, 500, 503)
"""Error statuses of routes that score documents."""

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
    kind = _ANTHROPIC_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    return {"error": _detail(problem) | {"type": kind}}


@dataclass(frozen=True)
class ErrorForm:
    """The errors of a wire format; called with a problem it returns the body.

    Attributes:
        dialect: The wire format, as metrics name it.
        body: The schema of the body.
        fields: Returns the fields of the body.
    """

    dialect: str
    body: type[BaseModel]
    fields: Callable[[Problem], Mapping[str, Any]]

    def __call__(self, problem: Problem) -> dict[str, Any]:
        """Return the body that reports a problem."""
        return self.body(**self.fields(problem)).model_dump()

    def responses(self, *statuses: int) -> dict[int | str, dict[str, Any]]:
        """Return the entries for ``responses=`` of a route with these error statuses."""
        return {status: {"model": self.body, "description": _DESCRIPTIONS[status]} for status in statuses}


OPENAI = ErrorForm("openai", ErrorBody, lambda problem: {"error": _detail(problem)})
ANTHROPIC = ErrorForm("anthropic", AnthropicErrorBody, _anthropic)
COHERE = ErrorForm(
    "cohere",
    CohereErrorBody,
    lambda problem: {"message": problem.message, "code": problem.code, "param": problem.param},
)
OLLAMA = ErrorForm("ollama", OllamaErrorBody, lambda problem: {"error": problem.message})
JINA = ErrorForm("jina", RerankErrorBody, lambda problem: {"detail": problem.message, "error": _detail(problem)})
"""Jina's clients show ``detail``."""
TEI = ErrorForm(
    "tei",
    TeiErrorBody,
    lambda problem: {"error": problem.message, "error_type": _TEI_TYPES.get(problem.status, "Validation")},
)
