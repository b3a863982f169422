"""The application. Its state is ``app.state.service``; importing this module builds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from fastapi import FastAPI

from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix.telemetry.build import Telemetry, open_telemetry
from rag_posfix_api import operations
from rag_posfix_api.dialects.anthropic import errors as anthropic_errors
from rag_posfix_api.dialects.anthropic import routes as anthropic
from rag_posfix_api.dialects.attention import routes as attention
from rag_posfix_api.dialects.cohere import errors as cohere_errors
from rag_posfix_api.dialects.cohere import routes as cohere
from rag_posfix_api.dialects.jina import errors as jina_errors
from rag_posfix_api.dialects.jina import routes as jina
from rag_posfix_api.dialects.native import collections, evaluate, info, keys
from rag_posfix_api.dialects.ollama import errors as ollama_errors
from rag_posfix_api.dialects.ollama import routes as ollama
from rag_posfix_api.dialects.openai import errors as openai_errors
from rag_posfix_api.dialects.openai import routes as openai
from rag_posfix_api.dialects.responses import routes as responses
from rag_posfix_api.dialects.tei import errors as tei_errors
from rag_posfix_api.dialects.tei import routes as tei
from rag_posfix_api.dialects.vllm import routes as vllm
from rag_posfix_api.http.auth import ApiKeyAuth
from rag_posfix_api.http.errors import ErrorRenderers, install_handlers
from rag_posfix_api.http.hosts import AllowedHosts
from rag_posfix_api.http.limits import BodyLimit
from rag_posfix_api.http.observability import ObservedRequests
from rag_posfix_api.http.tracing import request_tracer
from rag_posfix_api.page import api_docs
from rag_posfix_api.page import routes as page
from rag_posfix_api.runtime.service import Service, package_version

__all__ = ["RENDERERS", "ROUTERS", "create_app"]

ROUTERS = (
    openai.router,
    responses.router,
    anthropic.router,
    jina.router,
    cohere.router,
    ollama.router,
    vllm.router,
    tei.router,
    keys.router,
    collections.router,
    evaluate.router,
    info.router,
    attention.router,
    operations.router,
    page.router,
    api_docs.router,
)
"""The routes of every dialect, what orchestrators ask, and the page."""

RENDERERS = ErrorRenderers(
    openai_errors.render_error,
    {
        anthropic.PATH: anthropic_errors.render_error,
        jina.PATH: jina_errors.render_error,
        cohere.CHAT_PATH: cohere_errors.render_error,
        cohere.RERANK_PATH: cohere_errors.render_error,
        ollama.CHAT_PATH: ollama_errors.render_error,
        ollama.TAGS_PATH: ollama_errors.render_error,
        tei.PATH: tei_errors.render_error,
    },
)
"""The dialect that reports errors: that of the path, OpenAI's elsewhere."""


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
        settings: The model to load, and defaults of requests.
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
    app = FastAPI(
        title="rag_posfix",
        summary="Answers from documents that do not depend on the order of the documents.",
        version=package_version(),
        lifespan=_lifespan(state, pipeline),
        docs_url=None,  # FastAPI's pages load from a CDN; page/api_docs.py has ours
        redoc_url=None,
        # Its spans would carry what clients wrote; http/tracing.py writes ours.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = state
    for router in ROUTERS:
        app.include_router(router)
    install_handlers(app, RENDERERS)
    app.add_middleware(BodyLimit, max_body_bytes=limits.max_body_bytes, renderers=RENDERERS)
    app.add_middleware(ApiKeyAuth, checker=state.key_checker, renderers=RENDERERS)
    if hosts is not None:
        app.add_middleware(AllowedHosts, names=hosts, renderers=RENDERERS)
    tracer = request_tracer(telemetry.tracer_provider)
    app.add_middleware(ObservedRequests, metrics=state.metrics, renderers=RENDERERS, tracer=tracer)
    return app


def _lifespan(service: Service, pipeline: Pipeline | None) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = None
        if pipeline is None:
            loading = asyncio.create_task(service.load())
        else:  # again: an app may be started a second time, after it was stopped
            service.adopt(pipeline)
        try:
            yield
        finally:
            if loading is not None:
                loading.cancel()
                with suppress(asyncio.CancelledError):
                    await loading
            service.close()

    return lifespan
