"""The application. Its state is ``app.state.service``; importing this module does not build it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix.telemetry.build import Telemetry, open_telemetry
from rag_posfix_api.dialects import (
    administration,
    anthropic,
    cohere,
    collections,
    completions,
    embeddings,
    mcp,
    measurements,
    ollama,
    openai,
    rerank,
    responses,
)
from rag_posfix_api.http.errors import ANTHROPIC, COHERE, JINA, OLLAMA, OPENAI, TEI, ErrorForm
from rag_posfix_api.http.middleware import (
    AllowedHosts,
    ApiKeyAuth,
    BodyLimit,
    HeadRequests,
    ObservedRequests,
    install_handlers,
)
from rag_posfix_api.page import routes as page
from rag_posfix_api.runtime.service import Service, package_version

ROUTERS = {
    "openai": (openai.router, completions.router, embeddings.router),
    "responses": (responses.router,),
    "anthropic": (anthropic.router,),
    "cohere": (cohere.router, rerank.cohere),
    "jina": (rerank.jina,),
    "ollama": (ollama.router,),
    "vllm": (rerank.vllm,),
    "tei": (rerank.tei,),
    "native": (
        administration.keys,
        administration.indexes,
        collections.router,
        measurements.evaluation,
        administration.information,
    ),
    "attention": (measurements.attention,),
    "mcp": (mcp.router,),
    "none": (administration.operations, page.router),
}
"""The routes of every dialect; what orchestrators ask, and the page, have none. No router holds another."""

ERROR_FORMS = {
    anthropic.PATH: ANTHROPIC,
    anthropic.COUNT_PATH: ANTHROPIC,
    cohere.PATH: COHERE,
    rerank.JINA_PATH: JINA,
    rerank.COHERE_PATH: COHERE,
    rerank.TEI_PATH: TEI,
}
"""The dialect that reports the errors of a path; Ollama's below its folder, OpenAI's elsewhere."""

_CORS: Any = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["x-request-id", "retry-after"]}


def error_form(path: str) -> ErrorForm:
    """Return the form of the errors of a path."""
    return OLLAMA if path.startswith(ollama.FOLDER) else ERROR_FORMS.get(path, OPENAI)


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return the document of the API, with the key: pages that try it out then ask for one."""
        schema = super().openapi()
        schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}, {}]
        return schema


def create_app(
    settings: Settings,
    pipeline: Pipeline | None = None,
    service: ServiceSettings | None = None,
    *,
    hosts: Collection[str] | None = None,
    telemetry: Telemetry | None = None,
) -> FastAPI:
    """Return the application.

    Args:
        pipeline: The pipeline to serve at once, instead of loading one.
        service: Settings of the service; read from the environment if None.
        hosts: Names in the header ``Host`` that are answered; all if None.
        telemetry: Where traces and metrics go; what ``settings.telemetry`` and the environment say if None.

    Raises:
        ConfigError: telemetry is enabled in the settings, and is not installed or cannot be sent as asked.
    """
    limits = service or ServiceSettings()
    telemetry = telemetry or open_telemetry(settings.telemetry)
    state = Service(settings, limits, telemetry)
    if pipeline is not None:
        state.adopt(pipeline)
    app = _Application(
        title="rag_posfix",
        summary="Answers from documents that do not depend on the order of the documents.",
        version=package_version(),
        lifespan=_lifespan(state, pipeline),
        generate_unique_id_function=lambda route: route.name,
        docs_url=None,  # FastAPI's pages load from a CDN; page/routes.py replaces them
        redoc_url=None,
        redirect_slashes=False,  # redirects name the host of the request, which anybody can choose
        # Its spans would record the clients' text; http/middleware.py writes spans without it.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = state
    served = []
    for router in (router for routers in ROUTERS.values() for router in routers):
        app.include_router(router)
        served += router.routes
    install_handlers(app, error_form)
    app.add_middleware(HeadRequests, routes=served)
    app.add_middleware(BodyLimit, max_body_bytes=limits.max_body_bytes)
    app.add_middleware(ApiKeyAuth, checker=state.key_checker, quotas=state.quotas)
    if hosts is not None:
        app.add_middleware(AllowedHosts, names=hosts)
    dialects = {
        route.endpoint: dialect
        for dialect, routers in ROUTERS.items()
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
    }
    provider = telemetry.tracer_provider
    app.add_middleware(
        ObservedRequests,
        metrics=state.metrics,
        routes=served,
        dialects=dialects,
        form_of=error_form,
        tracer=None if provider is None else provider.get_tracer("rag_posfix_api"),
    )
    if limits.cors_origins:  # the outermost one: a page must be able to read errors too
        app.add_middleware(CORSMiddleware, allow_origins=limits.cors_origins, **_CORS)
    return app


def _lifespan(service: Service, pipeline: Pipeline | None) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading, following = None, asyncio.create_task(service.indexes.follow())
        if pipeline is None:
            loading = asyncio.create_task(service.load())
        else:  # again: an app may be started a second time, after it was stopped
            service.adopt(pipeline)
        app.state.mcp = sessions = mcp.McpSessions(service, package_version())
        try:
            yield
        finally:
            await sessions.close()
            for task in filter(None, (loading, following)):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            service.close()

    return lifespan
