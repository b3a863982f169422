"""From an error to a response: one table, one body, for every route.

The body is OpenAI's: ``{"error": {"message", "type", "param", "code"}}``. 422 says that a body has the wrong shape
or types, 400 that it reads well but asks for something that is not allowed or not served.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rag_posfix.errors import (
    ConfigError,
    GenerationCancelled,
    GenerationError,
    OverloadedError,
    PlanConflictError,
    PromptTooLongError,
    RagPosfixError,
    RerankingError,
    RetrievalError,
    UnknownNameError,
    UnsupportedModelError,
)
from services.api.facts import facts_of
from services.api.responses import SafeJSONResponse

__all__ = [
    "TABLE",
    "InvalidRequestError",
    "Kind",
    "ModelNotFoundError",
    "NotReadyError",
    "RequestTimeoutError",
    "TooLargeError",
    "UnauthorizedError",
    "UnsupportedFeatureError",
    "error_body",
    "error_response",
    "install_handlers",
    "kind_of",
    "log_failure",
]

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1


class InvalidRequestError(ConfigError):
    """A field of a request holds something that is not allowed.

    Args:
        message: What is wrong, the value, what is allowed, what to do.
        param: The field.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedFeatureError(InvalidRequestError):
    """A request asks for something that this service does not do."""


class ModelNotFoundError(InvalidRequestError):
    """A request names a model that is not served."""


class TooLargeError(InvalidRequestError):
    """A request brings more than it may."""


class UnauthorizedError(RagPosfixError):
    """The API key is missing or wrong."""


class NotReadyError(RagPosfixError):
    """The model is not loaded yet, or could not be loaded."""


class RequestTimeoutError(RagPosfixError):
    """An answer took longer than it may."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of error is told.

    Attributes:
        status: HTTP status.
        type: ``error.type`` of the body.
        code: ``error.code`` of the body.
        message: Told in place of the error's own text, where that is for the log only.
    """

    status: int
    type: str
    code: str
    message: str | None = None


_INVALID = "invalid_request_error"
_SERVER = "server_error"
_SEE_LOG = "; the server's log has the cause under this request id"

TABLE: Mapping[type[Exception], Kind] = {
    RequestValidationError: Kind(422, _INVALID, "invalid_request"),
    ConfigError: Kind(400, _INVALID, "invalid_value"),
    UnknownNameError: Kind(400, _INVALID, "unknown_name"),
    UnsupportedFeatureError: Kind(400, _INVALID, "unsupported"),
    UnsupportedModelError: Kind(400, _INVALID, "unsupported"),
    PlanConflictError: Kind(400, _INVALID, "unsupported"),
    UnauthorizedError: Kind(401, "authentication_error", "invalid_api_key"),
    ModelNotFoundError: Kind(404, _INVALID, "model_not_found"),
    TooLargeError: Kind(413, _INVALID, "request_too_large"),
    PromptTooLongError: Kind(413, _INVALID, "context_length_exceeded"),
    OverloadedError: Kind(429, "rate_limit_error", "overloaded"),
    GenerationCancelled: Kind(499, "cancelled", "client_closed_request"),
    RetrievalError: Kind(500, _SERVER, "retrieval_failed", "the index could not be searched" + _SEE_LOG),
    RerankingError: Kind(500, _SERVER, "reranking_failed", "the documents could not be scored" + _SEE_LOG),
    GenerationError: Kind(500, _SERVER, "generation_failed", "the model failed" + _SEE_LOG),
    Exception: Kind(500, _SERVER, "internal_error", "internal error" + _SEE_LOG),
    NotReadyError: Kind(503, "unavailable", "not_ready"),
    RequestTimeoutError: Kind(504, "timeout", "timeout"),
}

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def kind_of(error: Exception) -> Kind:
    """Return the row of the table for ``error``: its class, or the nearest base of it."""
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def error_body(error: Exception) -> dict[str, Any]:
    """Return the body that tells of ``error``; a server error goes to the log, and its text stays there."""
    kind = kind_of(error)
    message, param = kind.message or str(error), getattr(error, "param", None)
    if isinstance(error, RequestValidationError):
        message, param = _validation_message(error)
    if kind.status == 500:
        log_failure(error)
    return _body(message, kind.type, param, kind.code)


def error_response(error: Exception) -> Response:
    """Return the response that tells of ``error``."""
    status = 400 if _is_malformed(error) else kind_of(error).status
    headers = {}
    if status in (429, 503):
        headers["retry-after"] = str(RETRY_SECONDS)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return SafeJSONResponse(error_body(error), status, headers)


def install_handlers(app: FastAPI) -> None:
    """Make every error of a route leave ``app`` in the one shape."""

    async def known(request: Request, error: Exception) -> Response:
        facts_of(request).error = kind_of(error).code
        return error_response(error)

    async def routing(request: Request, error: Exception) -> Response:
        return _http_response(request, error)

    app.add_exception_handler(RagPosfixError, known)
    app.add_exception_handler(RequestValidationError, known)
    app.add_exception_handler(HTTPException, routing)


def _http_response(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return error_response(error)
    status = error.status_code
    messages = {
        404: f"nothing is served at {request.method} {request.url.path!r}; GET /openapi.json lists what is",
        405: f"{request.url.path!r} does not take {request.method}; the header 'allow' says what it takes",
    }
    message = messages.get(status, str(error.detail))
    kind = _INVALID if status < 500 else _SERVER
    body = _body(message, kind, None, _HTTP_CODES.get(status, "invalid_request" if status < 500 else "internal_error"))
    return SafeJSONResponse(body, status, dict(error.headers or {}))


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": " ".join(message.split()), "type": kind, "param": param, "code": code}}


def _is_malformed(error: Exception) -> bool:
    return isinstance(error, RequestValidationError) and any(e["type"] == "json_invalid" for e in error.errors())


def _validation_message(error: RequestValidationError) -> tuple[str, str | None]:
    """Return one line on the first thing that is wrong, and its field."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        return f"the body is no JSON: {first['ctx']['error']} at character {first['loc'][-1]}", None
    if isinstance(first.get("input"), bytes):
        return "the body must be JSON, sent with the header 'content-type: application/json'", None
    # Steps into a union carry the tag of the form that was chosen; it is no part of the body.
    path = [step for step in first["loc"][1:] if step not in ("string", "array", "object")]
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    given = "" if first["type"] == "missing" else f", got {_shortened(first.get('input'))}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    reason = first["msg"][:1].lower() + first["msg"][1:]
    return f"{name or 'body'}: {reason}{given}{more}", name or None


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def log_failure(error: Exception) -> None:
    """Log where an error came from. Its text may quote a prompt, so only the type and the places are kept."""
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    _log.error("request failed: %s", type(error).__name__, extra={"fields": {"places": places[-12:]}})
