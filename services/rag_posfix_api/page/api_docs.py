"""GET /docs: the document of the API as a page to try it out, with files of an installed package, not of a CDN."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from rag_posfix_api.http.errors import NotFoundError
from rag_posfix_api.page.routes import HEADERS

_PACKAGE: Final = "fastapi_offline"
"""Ships Swagger UI; its code is not used."""
_HEADERS: Final = HEADERS | {
    # Swagger UI writes style attributes.
    "content-security-policy": HEADERS["content-security-policy"].replace(
        "style-src 'self'", "style-src 'self' 'unsafe-inline'"
    )
}
_OWN: Final = StaticFiles(directory=Path(__file__).with_name("static"), check_dir=False)

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def api_docs(request: Request) -> Response:
    """Return the page."""
    _folder()
    return await _file(_OWN, "api-docs.html", request)


@router.get("/docs/{name}")
async def swagger_file(name: str, request: Request) -> Response:
    """Return a file of Swagger UI, or 404."""
    return await _file(StaticFiles(directory=_folder()), name, request)


async def _file(files: StaticFiles, name: str, request: Request) -> Response:
    response = await files.get_response(name, request.scope)
    response.headers.update(_HEADERS)
    return response


def _folder() -> Path:
    """Return the folder of Swagger UI's files.

    Raises:
        NotFoundError: the package is not installed.
    """
    found = find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise NotFoundError(
            "this page needs a package that is not installed; run: pip install 'rag-posfix[server]'. "
            "GET /openapi.json has the document"
        )
    return Path(found.origin).with_name("static")
