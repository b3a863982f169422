"""The application. Everything it knows hangs on ``app.state.service``; importing this builds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from fastapi import FastAPI

from rag_posfix.pipeline import Pipeline
from rag_posfix.settings import ServiceSettings, Settings
from services.api.errors import install_handlers
from services.api.guard import Guard
from services.api.observability import ObservedRequests
from services.api.routes import chat, health, metrics, models, rerank
from services.api.service import Service, package_version

__all__ = ["create_app"]


def create_app(
    settings: Settings, pipeline: Pipeline | None = None, service: ServiceSettings | None = None
) -> FastAPI:
    """Return the application.

    Args:
        settings: What to load, and what requests get that do not say.
        pipeline: Served at once, in place of loading one.
        service: How the service runs; read from the environment if None.
    """
    limits = service or ServiceSettings()
    state = Service(settings, limits)
    if pipeline is not None:
        state.adopt(pipeline)
    app = FastAPI(
        title="rag_posfix",
        summary="Answers from documents that do not depend on the order of the documents.",
        version=package_version(),
        lifespan=_lifespan(state, pipeline),
        redoc_url=None,
        # Spans of requests would carry what clients wrote.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = state
    for module in (chat, rerank, models, health, metrics):
        app.include_router(module.router)
    install_handlers(app)
    app.add_middleware(Guard, api_key=limits.api_key, max_body_bytes=limits.max_body_bytes)
    app.add_middleware(ObservedRequests, metrics=state.metrics)
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
