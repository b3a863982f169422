"""The log of the service process, the fields of a request's line, and identifiers.

The log has one line for each record, as JSON or as text, with the id of the request.

Lines of requests hold no text of clients: routes log numbers and names only, and of an exception that is logged during
a request its type and places are shown, because its message may quote a prompt.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import Depends, Request

from rag_posfix.text import visible

LogFormat = Literal["json", "text"]

REQUEST_ID: ContextVar[str | None] = ContextVar("rag_posfix_request_id", default=None)
"""The id of the request that this thread or task works for."""


class Identifiers:
    """Makes unique identifiers of 32 hexadecimal digits, not secret: 16 random ones of this object, and a count.

    A random identifier for each request would cost a system call, during which another thread takes the interpreter's
    lock: the request then waits until that thread gives it back. Safe to call from any thread.
    """

    def __init__(self) -> None:
        self._start = uuid.uuid4().hex[:16]
        self._count = itertools.count(1)

    def new(self) -> str:
        """Return an identifier that no other call returned."""
        return f"{self._start}{next(self._count):016x}"


@dataclass(slots=True)
class LogFields:
    """The fields of a request's log line: numbers and registry names, never text of a client or a model.

    Attributes:
        cache: ``hit``, ``miss`` or ``off``.
        documents: Number of documents in the request.
        grounded: Whether passages were there and the model wrote from them.
        support: Whether they support the answer: ``yes``, ``partly``, ``no`` or ``unknown``.
        truncated: Number of passages that were cut to fit.
        left_out: Number of passages that were left out for want of room.
        error: Code of the error, if there was one.
        key: Id of the API key, which is not the key.
        tenant: Tenant of the key, for metrics and spans; not logged.
        tokens: Tokens by kind.
        timings: Seconds by stage.
    """

    mitigation: str | None = None
    order: str | None = None
    cache: str | None = None
    documents: int | None = None
    grounded: bool | None = None
    support: str | None = None
    truncated: int | None = None
    left_out: int | None = None
    error: str | None = None
    key: str | None = None
    tenant: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set."""
        names = (
            "mitigation", "order", "cache", "documents", "grounded", "support", "truncated", "left_out", "error",
            "key",
        )  # fmt: skip
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        fields |= {f"{kind}_tokens": count for kind, count in self.tokens.items()}
        stages = {stage: round(seconds, 6) for stage, seconds in self.timings.items()}
        return fields | {"stage_seconds": stages} if stages else fields


async def log_fields(request: Request) -> LogFields:
    """Return the log fields of ``request``, which the outermost middleware has set."""
    fields: LogFields = request.state.log_fields
    return fields


RequestLogFields = Annotated[LogFields, Depends(log_fields)]
"""The log fields of the request, to be filled in."""


class _Formatter(logging.Formatter):
    """Collects the fields of a line: the fields of every record, and the entries of ``extra={"fields": {...}}``."""

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = REQUEST_ID.get()
        if request_id is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["traceback"] = self.formatException(record.exc_info) if request_id is None else _format_stack(error)
        return line


class JsonFormatter(_Formatter):
    """Formats a record as a JSON object: time, level, logger, message, request id, and fields."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.fields(record), default=str)


class TextFormatter(_Formatter):
    """Formats a record for people: time, level, logger, message, and the other fields as ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; after an exception, its traceback follows."""
        line = self.fields(record)
        trace = line.pop("traceback", None)
        first = " ".join(str(line.pop(name)) for name in ("time", "level", "logger", "message"))
        pairs = "".join(f" {name}={json.dumps(value, default=str)}" for name, value in line.items())
        text = visible((first + pairs).replace("\r", "\\r").replace("\n", "\\n"))  # no value forges a record
        return text if trace is None else f"{text}\n{visible(trace)}"


def configure_logging(log_format: LogFormat = "json", level: int = logging.INFO) -> None:
    """Send the log of this process to stderr. For the service process only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for library in ("faiss", "sentence_transformers", "uvicorn.error"):
        logging.getLogger(library).setLevel(max(level, logging.WARNING))  # else how each was loaded and started


def _format_stack(error: BaseException) -> str:
    """Return the type of an error and where it was raised, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    return "\n".join([type(error).__name__, *(f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames)])
