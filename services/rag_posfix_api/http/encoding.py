"""JSON and server-sent events of any string, including strings that UTF-8 cannot encode."""

from __future__ import annotations

import json
from typing import Any

import orjson
from starlette.responses import Response

from rag_posfix.text import clean_text


def encode_json(payload: Any) -> bytes:
    """Return ``payload`` as compact UTF-8 JSON: a lone surrogate becomes U+FFFD, a number that is not finite null."""
    try:
        return orjson.dumps(payload)
    except orjson.JSONEncodeError:  # a lone surrogate, or a number of more than 64 bits: rare, and slower
        text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return clean_text(text).encode()


def event(payload: Any, name: str | None = None) -> bytes:
    """Return one server-sent event.

    Args:
        name: Its type, for dialects whose clients read the type of events.
    """
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + encode_json(payload) + b"\n\n"


class SafeJSONResponse(Response):
    """A JSON response encoded by ``encode_json``."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return encode_json(content)
