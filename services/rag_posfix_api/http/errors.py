"""Converts errors to responses: one table of status codes, and a body in the dialect of the path.

Status 422 is for a body of the wrong shape or types. Status 400 is for a valid body with a value that is not allowed
or not supported.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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
    UpstreamError,
    UpstreamTimeoutError,
)
from rag_posfix_api.http.allowed_methods import allowed_methods
from rag_posfix_api.http.encoding import SafeJSONResponse
from rag_posfix_api.http.facts import facts_of

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 1
_MAX_RETRY_SECONDS = 600

MAX_MESSAGE = 1000
"""Characters of an error message; a client's own text is not sent back at length."""
_SHOWN = 60


class InvalidRequestError(ConfigError):
    """A field of a request has a value that is not allowed.

    Args:
        message: What is wrong, the value, what is allowed, what to do.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedFeatureError(InvalidRequestError):
    """A request needs a feature that this service does not support."""


class ModelNotFoundError(InvalidRequestError):
    """A request names a model that is not served."""


class NotFoundError(InvalidRequestError):
    """A request names something that its caller does not have."""


class ConflictError(InvalidRequestError):
    """A request would create something that exists."""


class TooLargeError(InvalidRequestError):
    """A request exceeds a size limit; each limit has a class of its own."""


class BodyTooLargeError(TooLargeError):
    """A body has too many bytes."""


class TooManyValuesError(TooLargeError):
    """A body has too many JSON values."""


class TooDeepError(TooLargeError):
    """A body nests lists and objects too deep."""


class TooManyEntriesError(TooLargeError):
    """A list of a body has too many entries."""


class TooManyDocumentsError(TooLargeError):
    """A request has too many documents."""


class TokenLimitError(InvalidRequestError):
    """A request has more tokens than all running requests together may have."""


class UnauthorizedError(RagPosfixError):
    """The API key is missing or wrong."""


class ForbiddenError(RagPosfixError):
    """The caller's key does not allow the request."""


class QuotaError(OverloadedError):
    """A key has used up what it may do now."""


class ForbiddenHostError(RagPosfixError):
    """The request was sent to a name that this service does not have."""


class NotReadyError(RagPosfixError):
    """The model is not loaded yet, or could not be loaded."""


class StoppingError(NotReadyError):
    """The service is stopping."""


class StorageError(RagPosfixError):
    """A change could not be written to the disk, and was not made."""


class RequestTimeoutError(RagPosfixError):
    """A request exceeded its time limit."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The response to one kind of error.

    Attributes:
        status: HTTP status.
        type: Class of errors, as in OpenAI's API.
        code: Name of the error, for programs.
        message: Text that is sent instead of the error's own, which is then only logged.
    """

    status: int
    type: str
    code: str
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """The part of an error that clients see; a dialect renders its body from this.

    Attributes:
        status: HTTP status.
        type: Class of errors, as in OpenAI's API.
        code: Name of the error, for programs.
        message: One line for people.
        param: The wrong field of the request, or None.
    """

    status: int
    type: str
    code: str
    message: str
    param: str | None = None


class RenderError(Protocol):
    """From a problem to the body of a dialect."""

    @property
    def dialect(self) -> str:
        """The wire format, as metrics name it."""
        ...

    def __call__(self, problem: Problem) -> Mapping[str, Any]:
        """Return the body."""
        ...


class ErrorRenderers:
    """Chooses the dialect of an error by the path of the request.

    Args:
        default: The dialect of every other path.
    """

    def __init__(self, default: RenderError, by_path: Mapping[str, RenderError]) -> None:
        self._default = default
        self._by_path = dict(by_path)

    def of(self, path: str) -> RenderError:
        """Return the dialect of ``path``."""
        return self._by_path.get(path, self._default)


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
    ForbiddenError: Kind(403, "permission_error", "insufficient_scope"),
    ForbiddenHostError: Kind(403, _INVALID, "forbidden_host"),
    NotFoundError: Kind(404, _INVALID, "not_found"),
    ConflictError: Kind(409, _INVALID, "already_exists"),
    ModelNotFoundError: Kind(404, _INVALID, "model_not_found"),
    TooLargeError: Kind(413, _INVALID, "request_too_large"),
    BodyTooLargeError: Kind(413, _INVALID, "body_too_large"),
    TooManyValuesError: Kind(413, _INVALID, "too_many_values"),
    TooDeepError: Kind(413, _INVALID, "nested_too_deep"),
    TooManyEntriesError: Kind(413, _INVALID, "list_too_long"),
    TooManyDocumentsError: Kind(413, _INVALID, "too_many_documents"),
    TokenLimitError: Kind(400, _INVALID, "token_limit_exceeded"),
    PromptTooLongError: Kind(400, _INVALID, "context_length_exceeded"),
    OverloadedError: Kind(429, "rate_limit_error", "overloaded"),
    QuotaError: Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    GenerationCancelled: Kind(499, "cancelled", "client_closed_request"),
    RetrievalError: Kind(500, _SERVER, "retrieval_failed", "the index could not be searched" + _SEE_LOG),
    RerankingError: Kind(500, _SERVER, "reranking_failed", "the documents could not be scored" + _SEE_LOG),
    GenerationError: Kind(500, _SERVER, "generation_failed", "the model failed" + _SEE_LOG),
    StorageError: Kind(500, _SERVER, "not_stored", "the change could not be written and was not made" + _SEE_LOG),
    UpstreamError: Kind(502, _SERVER, "upstream_failed", "the server of the model failed" + _SEE_LOG),
    UpstreamTimeoutError: Kind(504, "timeout", "upstream_timeout", "the server of the model took too long" + _SEE_LOG),
    Exception: Kind(500, _SERVER, "internal_error", "internal error" + _SEE_LOG),
    NotReadyError: Kind(503, "unavailable", "not_ready"),
    StoppingError: Kind(503, "unavailable", "stopping"),
    RequestTimeoutError: Kind(504, "timeout", "timeout"),
}

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


def code_of(status: int) -> str:
    """Return the code of a response of which only the status is known: that of the first such error in the table."""
    if status < 400:
        return "ok"
    known = (kind.code for kind in TABLE.values() if kind.status == status)
    return _HTTP_CODES.get(status) or next(known, "invalid_request" if status < 500 else "internal_error")


def kind_of(error: Exception) -> Kind:
    """Return the entry of the table for the class of ``error``, or for its nearest base class."""
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def problem_of(error: Exception) -> Problem:
    """Return the client's view of ``error``. The text of a server error is logged and not sent."""
    kind = kind_of(error)
    message, param = kind.message or str(error), getattr(error, "param", None)
    if isinstance(error, RequestValidationError):
        message, param = _validation_message(error)
    if kind.message is not None:
        log_failure(error)
    status = 400 if _is_malformed(error) else kind.status
    return Problem(status, kind.type, kind.code, _one_line(message), param if param is None else _short(param))


def error_response(error: Exception, render: RenderError) -> Response:
    """Return the response to ``error`` in the dialect of ``render``."""
    problem = problem_of(error)
    headers = {}
    if problem.status in (429, 503):
        headers["retry-after"] = str(_retry_seconds(error))
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    return SafeJSONResponse(render(problem), problem.status, headers)


def _retry_seconds(error: Exception) -> int:
    """Return when to try again: what the error knows, in whole seconds and within bounds."""
    known = getattr(error, "retry_seconds", None)
    return _RETRY_SECONDS if known is None else min(max(math.ceil(known), _RETRY_SECONDS), _MAX_RETRY_SECONDS)


def install_handlers(app: FastAPI, renderers: ErrorRenderers) -> None:
    """Install handlers in ``app`` that render every error of a route in the dialect of its path."""

    async def known(request: Request, error: Exception) -> Response:
        facts_of(request).error = kind_of(error).code
        return error_response(error, renderers.of(request.url.path))

    async def routing(request: Request, error: Exception) -> Response:
        return _http_response(request, error, renderers.of(request.url.path))

    app.add_exception_handler(RagPosfixError, known)
    app.add_exception_handler(RequestValidationError, known)
    app.add_exception_handler(HTTPException, routing)


def _http_response(request: Request, error: Exception, render: RenderError) -> Response:
    if not isinstance(error, HTTPException):
        return error_response(error, render)
    status = error.status_code
    messages = {
        404: f"nothing is served at {request.method} {request.url.path!r}; GET /openapi.json lists what is",
        405: f"{request.url.path!r} does not take {request.method}; the header 'allow' says what it takes",
    }
    message = messages.get(status, str(error.detail))
    kind = _INVALID if status < 500 else _SERVER
    code = _HTTP_CODES.get(status, "invalid_request" if status < 500 else "internal_error")
    problem = Problem(status, kind, code, _one_line(message))
    headers = {"allow": ", ".join(allowed_methods(request))} if status == 405 else dict(error.headers or {})
    return SafeJSONResponse(render(problem), status, headers)


def _one_line(message: str) -> str:
    line = " ".join(message[: 4 * MAX_MESSAGE].split())
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 3]}..."


def _is_malformed(error: Exception) -> bool:
    return isinstance(error, RequestValidationError) and any(e["type"] == "json_invalid" for e in error.errors())


def _validation_message(error: RequestValidationError) -> tuple[str, str | None]:
    """Return one line about the first validation error, and its field."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        return f"the body is no JSON: {first['ctx']['error']} at character {first['loc'][-1]}", None
    if isinstance(first.get("input"), bytes):
        return "the body must be JSON, sent with the header 'content-type: application/json'", None
    # Steps into a union carry the tag of the form that was chosen; it is no part of the body.
    path = [step for step in first["loc"][1:] if not _is_tag(step)]
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{_short(step)}" for step in path).lstrip(".")
    given = "" if first["type"] == "missing" else f", got {_shortened(first.get('input'))}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    reason = first["msg"][:1].lower() + first["msg"][1:]
    return f"{name or 'body'}: {reason}{given}{more}", name or None


def _shortened(value: Any) -> str:
    if isinstance(value, str):
        return _short(repr(value[: 2 * _SHOWN]))
    if isinstance(value, dict | list):  # the text of all of it could be as long as the body
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}" if value else repr(value)
    return _short(repr(value))


def _is_tag(step: object) -> bool:
    return step in ("string", "array", "object") or (isinstance(step, str) and step.startswith("form:"))


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def log_failure(error: Exception) -> None:
    """Log the type of an error and its stack without messages: the text of an error may quote a prompt."""
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    _log.error("request failed: %s", type(error).__name__, extra={"fields": {"places": places[-12:]}})
