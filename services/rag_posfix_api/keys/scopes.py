"""Which scope a request needs, told from its method and path before its body is read."""

from __future__ import annotations

import re

__all__ = ["required_scope"]

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_SEARCH = re.compile(r"/v1/collections/[^/]*/search")


def required_scope(method: str, path: str) -> str:
    """Return the scope that a request needs.

    Keys are for ``admin``; changing collections is for ``write``; everything else, searching included, for ``read``.

    Args:
        method: HTTP method.
        path: Path of the request, decoded.
    """
    if path == "/admin" or path.startswith("/admin/"):
        return "admin"
    if path == "/v1/collections" or path.startswith("/v1/collections/"):
        searches = method == "POST" and _SEARCH.fullmatch(path) is not None
        return "read" if searches or method in _READING else "write"
    return "read"
