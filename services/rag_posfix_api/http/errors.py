"""Errors of requests: one class with a code, and the status of every code. What a client sees is a ``Problem``.

Status 422 is for a body of the wrong shape or types. Status 400 is for a valid body with a value that is not allowed
or not supported.

Errors of each API format: a table of bodies.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from rag_posfix.errors import (
    ConfigError,
    GenerationCancelled,
    GenerationError,
    NoAnswerError,
    OverloadedError,
    PlanConflictError,
    PromptTooLongError,
    RagPosfixError,
    RerankingError,
    RetrievalError,
    UnknownNameError,
    UnsupportedModelError,
    UpstreamError,
    UpstreamTimeoutError,
    VectorStoreError,
)

_log = logging.getLogger(__name__)

MAX_MESSAGE: Final = 1000
"""Characters of an error message; a client's own text is not sent back at length."""
_MAX_VALUE: Final = 60

_TYPES: Final[Mapping[int | str, str]] = {
    "forbidden_host": "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "cancelled",
    503: "unavailable",
    504: "timeout",
}
_SEE_LOG: Final = "; the server's log has the cause under this request id"


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """The response to a class of errors.

    Attributes:
        code: Name of the error, for programs.
        message: Text that is sent instead of the error's own, which is then only logged.
    """

    status: int
    code: str
    message: str | None = None


_CODES: Mapping[int, tuple[str, ...]] = {
    400: ("invalid_value", "unsupported", "token_limit_exceeded"),
    401: ("invalid_api_key",),
    403: ("not_allowed", "insufficient_scope", "forbidden_host"),
    404: ("not_found", "model_not_found"),
    405: ("method_not_allowed",),
    408: ("request_timeout",),
    409: ("already_exists",),
    413: (
        "request_too_large", "body_too_large", "too_many_documents", "too_many_values", "nested_too_deep",
        "list_too_long", "response_too_large",
    ),
    415: ("unsupported_encoding",),
    429: ("rate_limit_exceeded",),
    431: ("head_too_large",),
    500: ("not_stored", "not_read"),
    503: ("not_ready", "quotas_unavailable", "keys_unavailable", "stopping"),
    504: ("timeout",),
}  # fmt: skip
_HIDING = {
    "not_stored": "the change could not be written and was not made" + _SEE_LOG,
    "not_read": "the collection could not be read" + _SEE_LOG,
}

ERRORS: Final[Mapping[str | type[Exception], ErrorSpec]] = {
    RequestValidationError: ErrorSpec(422, "invalid_request"),
    ConfigError: ErrorSpec(400, "invalid_value"),
    UnknownNameError: ErrorSpec(400, "unknown_name"),
    UnsupportedModelError: ErrorSpec(400, "unsupported"),
    PlanConflictError: ErrorSpec(400, "unsupported"),
    PromptTooLongError: ErrorSpec(400, "context_length_exceeded"),
    OverloadedError: ErrorSpec(429, "overloaded"),
    GenerationCancelled: ErrorSpec(499, "client_closed_request"),
    RetrievalError: ErrorSpec(500, "retrieval_failed", "the index could not be searched" + _SEE_LOG),
    VectorStoreError: ErrorSpec(503, "retrieval_unavailable", "the vector store does not answer" + _SEE_LOG),
    RerankingError: ErrorSpec(500, "reranking_failed", "the documents could not be scored" + _SEE_LOG),
    GenerationError: ErrorSpec(500, "generation_failed", "the model failed" + _SEE_LOG),
    UpstreamError: ErrorSpec(502, "upstream_failed", "the server of the model failed" + _SEE_LOG),
    NoAnswerError: ErrorSpec(502, "upstream_failed"),
    UpstreamTimeoutError: ErrorSpec(504, "upstream_timeout", "the server of the model took too long" + _SEE_LOG),
    Exception: ErrorSpec(500, "internal_error", "internal error" + _SEE_LOG),
} | {code: ErrorSpec(status, code, _HIDING.get(code)) for status, codes in _CODES.items() for code in codes}
"""The errors of other packages by class, and those of this service, which are ``RequestError``, by code."""


class RequestError(RagPosfixError):
    """A request is rejected or fails.

    Args:
        param: The wrong field of the request.
        code: A code of ``ERRORS``.
        retry_seconds: When to try again, if that is known.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str = "invalid_value",
        retry_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.spec = ERRORS[code]
        self.param, self.retry_seconds = param, retry_seconds

    @property
    def code(self) -> str:
        """Name of the error."""
        return self.spec.code


@dataclass(frozen=True, slots=True)
class Problem:
    """The part of an error that clients see; a dialect renders its body from this.

    Attributes:
        code: Name of the error, for programs.
        message: One line for people.
        param: The wrong field of the request, or None.
    """

    status: int
    code: str
    message: str
    param: str | None = None

    @property
    def type(self) -> str:
        """Class of errors, as in OpenAI's API."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return _TYPES.get(self.code, _TYPES.get(self.status, default))


_DESCRIPTIONS = {
    400: "The request asks for something that is not allowed or not served.",
    401: "The API key is missing or wrong.",
    403: "The API key does not allow this.",
    404: "The model is not served, or what the path names does not exist.",
    409: "It exists already.",
    413: "The request is too large.",
    415: "The body is compressed.",
    422: "The body has the wrong shape.",
    429: "There is no capacity now; see the header retry-after.",
    500: "The service failed.",
    502: "The server of a remote model failed.",
    503: "The model is not loaded.",
    504: "The answer took too long.",
}


@dataclass(frozen=True)
class ErrorForm:
    """The errors of an API format; called with a problem it returns the body.

    Attributes:
        dialect: The API format, as metrics name it.
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


def spec_of(error: Exception) -> ErrorSpec:
    """Return the spec of an error, or of the nearest base class of its class."""
    if isinstance(error, RequestError):
        return error.spec
    return next(ERRORS[cls] for cls in type(error).__mro__ if cls in ERRORS)


def problem_of(error: Exception) -> Problem:
    """Return the client's view of an error. The text of a server error is logged and not sent."""
    spec = spec_of(error)
    status, message, param = spec.status, spec.message or str(error), getattr(error, "param", None)
    if isinstance(error, RequestValidationError):
        message, param = _describe_invalid(error)
        if any(problem["type"] == "json_invalid" for problem in error.errors()):
            status = 400
    if spec.message is not None:
        log_failure(error)
    return Problem(status, spec.code, one_line(message), param if param is None else _shorten(param))


def one_line(message: str) -> str:
    """Return an error message on one line of bounded length."""
    line = " ".join(message[: 4 * MAX_MESSAGE].split())
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 3]}..."


def _describe_invalid(error: RequestValidationError) -> tuple[str, str | None]:
    """Return one line about the first validation error, and its field."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        return f"the body is no JSON: {first['ctx']['error']} at character {first['loc'][-1]}", None
    if isinstance(first.get("input"), bytes):
        return "the body must be JSON, sent with the header 'content-type: application/json'", None
    # Steps into a union carry the tag of the chosen form, which is not in the body.
    path = [step for step in first["loc"][1:] if not _is_tag(step)]
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{_shorten(step)}" for step in path).lstrip(".")
    value = "" if first["type"] == "missing" else f", got {_describe_value(first.get('input'))}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    reason = (first["msg"][:1].lower() + first["msg"][1:]).removeprefix("value error, ")
    if first["type"] == "extra_forbidden":
        reason = "no such field; GET /openapi.json lists the fields"
    return f"{name or 'body'}: {reason}{value}{more}", name or None


def _describe_value(value: Any) -> str:
    if isinstance(value, str):
        return _shorten(repr(value[: 2 * _MAX_VALUE]))
    if isinstance(value, dict | list):  # the text of all of it could be as long as the body
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}" if value else repr(value)
    return _shorten(repr(value))


def _is_tag(step: object) -> bool:
    return step in ("string", "array", "object") or (isinstance(step, str) and step.startswith("form:"))


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."


def log_failure(error: Exception) -> None:
    """Log the type of an error and its stack without messages: the text of an error may quote a prompt."""
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    _log.error(
        "request failed: %s", getattr(error, "code", type(error).__name__), extra={"fields": {"places": frames[-12:]}}
    )


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


class AnthropicErrorBody(ErrorBody):
    """The body of every error; ``code`` and ``param`` are this service's own."""

    type: Literal["error"] = "error"


class CohereErrorBody(BaseModel):
    """The body of every error."""

    message: str
    code: str
    param: str | None


class OllamaErrorBody(BaseModel):
    """The body of every error."""

    error: str


class RerankErrorBody(ErrorBody):
    """The body of every error."""

    detail: str


class TeiErrorBody(OllamaErrorBody):
    """The body of every error."""

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
    default = "invalid_request_error" if problem.status < 500 else "api_error"
    return {"error": _detail(problem) | {"type": _ANTHROPIC_TYPES.get(problem.status, default)}}


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
