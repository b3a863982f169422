"""The methods of a path, for the header ``Allow``: a path may have a route for each of its methods."""

from __future__ import annotations

from fastapi import Request
from starlette.routing import Match

_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


def allowed_methods(request: Request) -> list[str]:
    """Return the methods that the path of ``request`` takes. The router itself names those of one route only."""
    routes = request.app.routes
    return [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]
