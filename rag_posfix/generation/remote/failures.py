"""What a server's error says, and the error that is raised for it."""

from __future__ import annotations

import json
import re
from typing import Any

from rag_posfix.errors import (
    GenerationError,
    OverloadedError,
    PromptTooLongError,
    UpstreamError,
    UpstreamTimeoutError,
)

_SHOWN = 300
_TOO_LONG = re.compile(r"context[ _](length|window|size)|maximum context|too many tokens|n_ctx", re.IGNORECASE)
_ADVICE = {
    401: "; set RAG_POSFIX_REMOTE_API_KEY to a key of that server",
    403: "; set RAG_POSFIX_REMOTE_API_KEY to a key that may use this model",
    404: "; check the name of the model and the base URL in openai:NAME@URL",
}


def failure_of_status(
    server: str, status: int, body: bytes, retry_seconds: float = 0.0
) -> GenerationError | OverloadedError | PromptTooLongError:
    """Return the error for a response that is not a success; ``retry_seconds`` is its ``Retry-After``.

    Messages hold no key. A server's text may quote a prompt, so it is only in errors whose text the HTTP service
    does not send; ``OverloadedError`` and ``PromptTooLongError`` are sent as they are.
    """
    try:
        payload: Any = json.loads(body)
    except (ValueError, RecursionError):
        payload = None
    reason = error_message(payload)
    message = f"{server} answered with status {status}{f': {reason}' if reason else ''}"
    if status in (400, 413, 422) and _TOO_LONG.search(reason):
        return PromptTooLongError(
            "the prompt exceeds the context window of the remote generator; use fewer or shorter passages, and set "
            "RAG_POSFIX_REMOTE_CONTEXT_WINDOW to the server's limit, so that passages are left out in time"
        )
    if status == 429:
        return OverloadedError(
            "the remote generator has no capacity now (status 429); try again later", retry_seconds or None
        )
    if status in (408, 504):
        return UpstreamTimeoutError(f"{message}; try again later, or lower max_tokens")
    if status == 400 and "max_completion_tokens" in reason:
        message += "; set RAG_POSFIX_REMOTE_MAX_TOKENS_FIELD=max_completion_tokens"
    return UpstreamError(message + _ADVICE.get(status, ""), status)


def error_message(payload: Any) -> str:
    """Return the message and the code of an error object, on one line; empty if there are none.

    Forms: ``{"error": {"message", "code"}}``, ``{"error": text}``, ``{"message": text}``, ``{"detail": text}`` or
    ``{"detail": [{"msg": text}]}``; Gemini puts them into a list.
    """
    if isinstance(payload, list) and payload:
        payload = payload[0]
    if not isinstance(payload, dict):
        return ""
    inner = payload.get("error") or payload
    if not isinstance(inner, dict):
        inner = {"message": inner}
    detail = inner.get("detail")
    problems = [each.get("msg") for each in detail if isinstance(each, dict)] if isinstance(detail, list) else []
    texts = [inner.get("message"), detail, *problems, inner.get("code")]
    line = " ".join(" ".join(text for text in texts if isinstance(text, str))[: 4 * _SHOWN].split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."
