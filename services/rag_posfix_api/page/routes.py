"""GET / and /page/...: the files of the page, with a content security policy. No key is needed to read them.

GET /v1/posfix/sample: a question about the index, for the caller of a key.

GET /docs: the document of the API as a page to try it out, with files of an installed package, not of a CDN.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import anyio.to_thread
from fastapi import APIRouter, Request
from langchain_core.documents import Document
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from rag_posfix.contracts.retrieval import current_of
from rag_posfix.errors import install_command
from rag_posfix.retrieval.base import first_passages
from rag_posfix.retrieval.ingest.structure import HEADING_SEPARATOR
from rag_posfix_api.http.errors import RequestError
from rag_posfix_api.http.middleware import SafeJSONResponse
from rag_posfix_api.runtime.service import ReadyService, ServiceState

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
_DOCS_HEADERS: Final = HEADERS | {
    # Swagger UI writes style attributes.
    "content-security-policy": HEADERS["content-security-policy"].replace(
        "style-src 'self'", "style-src 'self' 'unsafe-inline'"
    )
}
_SWAGGER_PACKAGE: Final = "fastapi_offline"
"""Ships Swagger UI; its code is not used."""

_FILES: Final = StaticFiles(directory=Path(__file__).with_name("static"), check_dir=False)

_SAMPLED: Final = 200
"""Passages of the index that are looked at for a question."""
_MAX_HEADING: Final = 80
_QUESTION_MARKS: Final = ("?", "\uff1f", "\u061f")
_NAME: Final = re.compile(r"\b[^\W\d_a-z]\w+(?: [^\W\d_a-z]\w+)+")
"""Two words or more in a row that begin with a capital letter."""

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """Return the page."""
    return await _file(_FILES, "index.html", request, HEADERS)


@router.get("/page/service.json")
async def service_state(service: ServiceState) -> Response:
    """Return what the page asks before it has a key: readiness, whether keys are needed, attention, and an index."""
    try:
        gives_attention = service.reader is not None
    except RequestError:
        gives_attention = False
    state = {
        "ready": service.is_ready,
        "key": service.key_checker.required,
        "attention": gives_attention,
        "index": service.is_ready and service.pipeline.retriever is not None,
    }
    return SafeJSONResponse(state, headers=HEADERS)


@router.get("/v1/posfix/sample")
async def sample(service: ReadyService) -> Response:
    """Return a question about a passage of the served index that the caller may read; null without such a passage."""
    pipeline, with_text = service.pipeline, service.limits.source_text
    retriever = None if pipeline.retriever is None else current_of(pipeline.retriever)

    def find() -> str | None:
        passages = first_passages(retriever, pipeline.defaults.filter, _SAMPLED)
        return next(filter(None, (sample_question(passage, with_text=with_text) for passage in passages)), None)

    return SafeJSONResponse({"question": await anyio.to_thread.run_sync(find)}, headers={"cache-control": "no-store"})


def sample_question(passage: Document, *, with_text: bool) -> str | None:
    """Return a question that a passage answers, by its last heading or its first name; None if it has neither.

    A heading that is a question, as in an FAQ, is the question.
    """
    heading = str(passage.metadata.get("title") or "").rpartition(HEADING_SEPARATOR)[2].strip()
    if heading.endswith(_QUESTION_MARKS):
        return heading
    if not heading and with_text:
        name = _NAME.search(passage.page_content)
        heading = "" if name is None else name[0]
    return f"What is said about {heading}?" if 0 < len(heading) <= _MAX_HEADING else None


@router.get("/page/{path:path}")
async def asset(path: str, request: Request) -> Response:
    """Return a file of the page, or 404."""
    return await _file(_FILES, path, request, HEADERS)


@router.get("/docs")
async def api_docs(request: Request) -> Response:
    """Return the page of the API's document."""
    _swagger_folder()
    return await _file(_FILES, "api-docs.html", request, _DOCS_HEADERS)


@router.get("/docs/{name}")
async def swagger_file(name: str, request: Request) -> Response:
    """Return a file of Swagger UI, or 404."""
    return await _file(StaticFiles(directory=_swagger_folder()), name, request, _DOCS_HEADERS)


async def _file(files: StaticFiles, path: str, request: Request, headers: Mapping[str, str]) -> Response:
    response = await files.get_response(path, request.scope)
    response.headers.update(headers)
    return response


def _swagger_folder() -> Path:
    """Return the folder of Swagger UI's files; raise ``RequestError`` if the package is not installed."""
    spec = find_spec(_SWAGGER_PACKAGE)
    if spec is None or spec.origin is None:
        raise RequestError(
            f"this page needs a package that is not installed; {install_command('server')}. "
            "GET /openapi.json has the document",
            code="not_found",
        )
    return Path(spec.origin).with_name("static")
