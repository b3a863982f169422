"""JSON of requests and responses: bodies of bounded shape in, compact JSON and server-sent events out.

A parser and a validator cost microseconds for each value, so a small body of many values costs far more than a large
text. ``check_shape`` counts values in the bytes: a rejected body is never parsed. Lone surrogates, which JSON can
escape and UTF-8 cannot encode, become U+FFFD in both directions.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

import orjson
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rag_posfix.errors import GenerationCancelled, OverloadedError
from rag_posfix.text import clean_text
from rag_posfix_api.http.auth import CALLER
from rag_posfix_api.http.errors import TooDeepError, TooManyEntriesError, TooManyValuesError, UnsupportedFeatureError

MAX_VALUES: Final = 50_000
"""Strings, numbers, names, lists and objects in a body."""
MAX_DEPTH: Final = 64
"""Lists and objects nest at most so deep in a body."""
MAX_LIST: Final = 4096
"""Entries of a list directly in the body."""

FILTER_FIELDS: Final = ("filter", "filters", "where", "acl")
"""Names that other programs give to filters."""

_PIECE_BYTES = 64 * 1024

_BRACKET = re.compile(rb"[\[{\]}]")
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def encode_json(payload: Any) -> bytes:
    """Return ``payload`` as compact UTF-8 JSON: a lone surrogate becomes U+FFFD, a number that is not finite null."""
    try:
        return orjson.dumps(payload)
    except orjson.JSONEncodeError:  # a lone surrogate, or a number of more than 64 bits: rare, and slower
        text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return clean_text(text).encode()


def event(payload: Any, name: str | None = None) -> bytes:
    """Return one server-sent event, of type ``name`` for dialects whose clients read the type."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + encode_json(payload) + b"\n\n"


def typed_event(name: str, **fields: Any) -> bytes:
    """Return one server-sent event whose payload repeats its type."""
    return event({"type": name, **fields}, name)


class UnreadResponses:
    """Bytes of large responses that clients have not read yet, by tenant. For one event loop.

    Args:
        max_bytes: Of all such responses of a tenant together; a single one may be larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def hold(self, tenant: str, size: int) -> Iterator[None]:
        """Count a response while it is sent; OverloadedError if too many bytes of the tenant are unread."""
        unread = self._bytes[tenant]
        if unread and unread + size > self._max_bytes:
            raise OverloadedError(f"{unread} bytes of earlier responses are not read yet; read them, then ask again")
        self._bytes[tenant] += size
        try:
            yield
        finally:
            self._bytes[tenant] -= size
            if not self._bytes[tenant]:
                del self._bytes[tenant]


class SafeJSONResponse(Response):
    """A JSON response encoded by ``encode_json``; bytes are encoded already.

    A large one is sent as its client reads it. It counts as a request in flight, and for its tenant, until then.
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return content if isinstance(content, bytes) else encode_json(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        body = bytes(self.body)
        if len(body) <= _PIECE_BYTES:
            await super().__call__(scope, receive, send)
            return
        service = scope["app"].state.service
        with service.rerank.open(), service.unread.hold(CALLER.get().tenant, len(body)):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(body), _PIECE_BYTES):
                stop = start + _PIECE_BYTES  # the next piece waits until the connection has sent this one
                await send({"type": "http.response.body", "body": body[start:stop], "more_body": stop < len(body)})


class CleanRoute(APIRoute):
    """A route whose request body has a bounded shape and no lone surrogates."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler."""
        handler = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation
        body_fields = frozenset(getattr(model, "model_fields", ()))

        async def clean(request: Request) -> Response:
            checked = _CleanRequest(request.scope, request.receive)
            try:
                check_shape(await checked.body())
            except ClientDisconnect as error:
                raise GenerationCancelled("the client went away before its request was complete") from error
            try:
                body = await checked.json()
            except (ValueError, RecursionError):
                pass  # reported when the route reads the body
            else:
                check_lists(body, request.app.state.service.limits.max_documents)
                check_filter_fields(body, body_fields)
            return await handler(checked)

        return clean


class _CleanRequest(Request):
    async def json(self) -> Any:
        """Return the body, which is UTF-8; each lone surrogate in it becomes U+FFFD, in names as well as in values."""
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                text = body.decode("utf-8-sig", "surrogatepass")
            except UnicodeDecodeError as error:  # ``check_shape`` counts bytes: of UTF-16 it would see no structure
                raise json.JSONDecodeError(f"the body is not UTF-8 ({error.reason})", "", error.start) from error
            self._json = json.loads(text)
            if _MAYBE_SURROGATE.search(body) is not None:
                # The parser has joined the pairs: surrogates that are left are lone ones.
                self._json = json.loads(_SURROGATE.sub("\ufffd", json.dumps(self._json, ensure_ascii=False)))
        return self._json


def check_shape(body: bytes) -> int:
    """Return an estimate of the number of values; raise for too many values or levels. The body may be invalid JSON.

    Cost: linear; about 40 ms for 8 MB.

    Raises:
        TooManyValuesError: there are more than ``MAX_VALUES`` values.
        TooDeepError: there are more than ``MAX_DEPTH`` levels.
    """
    # Escapes occur in strings only. Without them, the quotes separate strings from structure.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    values = plain.count(b'"') // 2
    _check_values(values)
    outside = b'"'.join(plain.split(b'"')[::2])
    # A comma or colon precedes all values but the first of each list and object.
    values = max(values, sum(outside.count(mark) for mark in (b",", b":", b"[", b"{")))
    _check_values(values)
    depth = deepest = 0
    for bracket in _BRACKET.findall(outside):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise TooDeepError(
            f"the body nests lists and objects {deepest} levels deep, at most {MAX_DEPTH} are allowed; "
            "write it flatter"
        )
    return values


def _check_values(count: int) -> None:
    if count > MAX_VALUES:
        raise TooManyValuesError(
            f"the body has about {count} JSON values, at most {MAX_VALUES} are allowed; send fewer documents or "
            "messages, with less metadata"
        )


def check_filter_fields(body: Any, body_fields: Collection[str]) -> None:
    """Raise for a field of the body that looks like a filter and is none: it must not be ignored.

    Args:
        body_fields: The fields of the route's body.
    """
    for name in FILTER_FIELDS if isinstance(body, dict) else ():
        if body.get(name) is None or name in body_fields:
            continue
        correct_name = next((field for field in ("posfix", "filter") if field in body_fields), None)
        if correct_name is None:
            advice = "this route reads only what the request sends; leave it out"
        else:
            advice = f"give the filter as {'posfix.filter' if correct_name == 'posfix' else 'filter'}"
        raise UnsupportedFeatureError(f"{name} is not a field of this request; {advice}", param=name)


def check_lists(body: Any, max_documents: int) -> None:
    """Raise if a field of the body is a list of more than ``max_documents`` and ``MAX_LIST`` entries.

    Dialects may allow fewer.
    """
    max_entries = max(max_documents, MAX_LIST)
    for name, value in body.items() if isinstance(body, dict) else ():
        if isinstance(value, list) and len(value) > max_entries:
            field = name if len(name) <= 60 else f"{name[:57]}..."
            raise TooManyEntriesError(
                f"{field} has {len(value)} entries, at most {max_entries} are allowed", param=field
            )
