"""The log of the service process: one line for each record, as JSON or as text, with the id of the request.

Lines of requests hold no text of clients: routes log numbers and names only, and of an exception that is logged during
a request its type and places are shown, because its message may quote a prompt.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from contextvars import ContextVar
from typing import Any, Literal

LogFormat = Literal["json", "text"]

REQUEST_ID: ContextVar[str | None] = ContextVar("rag_posfix_request_id", default=None)
"""The id of the request that this thread or task works for."""


class _Formatter(logging.Formatter):
    """Collects the fields of a line: those of every record, and the entries of ``extra={"fields": {...}}``."""

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the fields by name."""
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
            line["traceback"] = self.formatException(record.exc_info) if request_id is None else _places(error)
        return line


class JsonFormatter(_Formatter):
    """Formats a record as a JSON object: time, level, logger, message, request id, and fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return json.dumps(self.fields(record), default=str)


class TextFormatter(_Formatter):
    """Formats a record for people: time, level, logger, message, and the other fields as ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; after an exception, its traceback follows."""
        line = self.fields(record)
        trace = line.pop("traceback", None)
        first = " ".join(str(line.pop(name)) for name in ("time", "level", "logger", "message"))
        rest = "".join(f" {name}={json.dumps(value, default=str)}" for name, value in line.items())
        told = (first + rest).replace("\r", "\\r").replace("\n", "\\n")  # one record, one line: nobody can forge one
        return told if trace is None else f"{told}\n{trace}"


def configure_logging(log_format: LogFormat = "json", level: int = logging.INFO) -> None:
    """Send the log of this process to stderr. For the service process only.

    Args:
        log_format: ``json`` or ``text``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _places(error: BaseException) -> str:
    """Return the type of an error and where it was raised, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return "\n".join([type(error).__name__, *places])
