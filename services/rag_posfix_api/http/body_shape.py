"""Limits on the shape of a JSON body: values, depth and list lengths, before anything is built from it.

A parser and a validator cost microseconds for each value, so a small body of many values costs far more than a large
text. ``check_shape`` counts values in the bytes: what is refused was never parsed.
"""

from __future__ import annotations

import re
from typing import Any, Final

from rag_posfix_api.http.errors import TooDeepError, TooManyEntriesError, TooManyValuesError

MAX_VALUES: Final = 50_000
"""Strings, numbers, names, lists and objects in a body."""
MAX_DEPTH: Final = 64
"""Lists and objects nest at most so deep in a body."""
MAX_LIST: Final = 4096
"""Entries of a list directly in the body."""

_BRACKET = re.compile(rb"[\[{\]}]")


def check_shape(body: bytes) -> int:
    """Return an estimate of the number of values; raise for too many values or levels. The body may be invalid JSON.

    Cost: linear; about 40 ms for 8 MB.

    Raises:
        TooManyValuesError: there are more than ``MAX_VALUES`` values.
        TooDeepError: there are more than ``MAX_DEPTH`` levels.
    """
    # Escapes occur in strings only. Without them, the quotes separate what is in strings from what is not.
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


def check_lists(body: Any, max_list: int) -> None:
    """Raise if a field of the body is a list with too many entries. Dialects may allow fewer.

    Args:
        max_list: How many entries are allowed, at least ``MAX_LIST``.

    Raises:
        TooManyEntriesError: a list has more.
    """
    if not isinstance(body, dict):
        return
    allowed = max(max_list, MAX_LIST)
    for name, value in body.items():
        if isinstance(value, list) and len(value) > allowed:
            field = name if len(name) <= 60 else f"{name[:57]}..."
            raise TooManyEntriesError(f"{field} has {len(value)} entries, at most {allowed} are allowed", param=field)


def _check_values(count: int) -> None:
    if count > MAX_VALUES:
        raise TooManyValuesError(
            f"the body has about {count} JSON values, at most {MAX_VALUES} are allowed; send fewer documents or "
            "messages, with less metadata"
        )
