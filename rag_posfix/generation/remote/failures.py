"""Which error of the project stands for a failure of a server.

Messages hold no key. What a server says may quote a prompt, so it stands only in errors whose text the HTTP service
does not send; ``OverloadedError`` and ``PromptTooLongError`` are sent as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rag_posfix.errors import GenerationError, OverloadedError, PromptTooLongError, UpstreamError, UpstreamTimeoutError

RETRIED = frozenset({429, 503})
"""Statuses that say that the same request may succeed later."""

_SHOWN = 300
_TOO_LONG = re.compile(r"context[ _](length|window|size)|maximum context|too many tokens|n_ctx", re.IGNORECASE)
_ADVICE = {
    401: "; set RAG_POSFIX_REMOTE_API_KEY to a key of that server",
    403: "; set RAG_POSFIX_REMOTE_API_KEY to a key that may use this model",
    404: "; check the name of the model and the base URL in openai:NAME@URL",
}


def failure_of_status(server: str, status: int, body: bytes) -> GenerationError | OverloadedError | PromptTooLongError:
    """Return the error for a response that is not a success."""
    reason = _stated_reason(body)
    said = f"{server} answered with status {status}{f': {reason}' if reason else ''}"
    if status in (400, 413, 422) and _TOO_LONG.search(reason):
        return PromptTooLongError(
            "the prompt exceeds the context window of the remote generator; use fewer or shorter passages, and set "
            "RAG_POSFIX_REMOTE_CONTEXT_WINDOW to the server's limit, so that passages are left out in time"
        )
    if status == 429:
        return OverloadedError("the remote generator has no capacity now (status 429); try again later")
    if status in (408, 504):
        return UpstreamTimeoutError(f"{said}; try again later, or lower max_tokens")
    return UpstreamError(said + _ADVICE.get(status, ""))


def _stated_reason(body: bytes) -> str:
    """Return the message and the code that the body of an error states, on one line; empty if there are none."""
    try:
        told: Any = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return error_message(told) if isinstance(told, dict) else ""


def error_message(told: Mapping[str, Any]) -> str:
    """Return the message and the code of an error object, on one line; empty if there are none.

    Args:
        told: ``{"error": {"message", "code"}}``, ``{"error": text}``, ``{"message": text}`` or ``{"detail": text}``.
    """
    inner = told.get("error", told)
    if not isinstance(inner, dict):
        inner = {"message": inner}
    parts = [inner.get(name) for name in ("message", "detail", "code")]
    line = " ".join(" ".join(part for part in parts if isinstance(part, str))[: 4 * _SHOWN].split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."
