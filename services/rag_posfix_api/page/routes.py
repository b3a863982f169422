"""GET / and /page/...: the files of the page, with a content security policy. No key is needed to read them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from rag_posfix_api.http.encoding import SafeJSONResponse
from rag_posfix_api.http.errors import NotReadyError, UnsupportedFeatureError
from rag_posfix_api.runtime.service import Service, ServiceState

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",  # asked again each time and answered with 304: a new version shows at once
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Headers of every file of the page."""

_FILES: Final = StaticFiles(directory=Path(__file__).with_name("static"), check_dir=False)

router = APIRouter(include_in_schema=False)


class PageFacts(BaseModel):
    """What the page asks before it has a key.

    Attributes:
        ready: Whether questions are answered.
        key: Whether requests need a key.
        attention: Whether the service measures attention.
    """

    ready: bool
    key: bool
    attention: bool


@router.get("/")
async def page(request: Request) -> Response:
    """Return the page."""
    return await _file("index.html", request)


@router.get("/page/service.json")
async def facts(service: ServiceState) -> Response:
    """Return what the page asks before it has a key."""
    found = PageFacts(ready=service.is_ready, key=service.key_checker.required, attention=_gives_attention(service))
    return SafeJSONResponse(found.model_dump(), headers=HEADERS)


@router.get("/page/{path:path}")
async def asset(path: str, request: Request) -> Response:
    """Return a file of the page, or 404."""
    return await _file(path, request)


async def _file(path: str, request: Request) -> Response:
    response = await _FILES.get_response(path, request.scope)
    response.headers.update(HEADERS)
    return response


def _gives_attention(service: Service) -> bool:
    try:
        return service.reader is not None
    except (NotReadyError, UnsupportedFeatureError):
        return False
