"""Routes for orchestrators: /livez, /readyz and their aliases, and /metrics for Prometheus."""

from __future__ import annotations

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, Field
from starlette.responses import Response

from rag_posfix_api.dialects.errors import OPENAI
from rag_posfix_api.runtime.service import ReadyService, ServiceState

router = APIRouter()


class Health(BaseModel):
    """The response of a probe."""

    status: str


class Readiness(Health):
    """The response of a readiness probe."""

    detail: str | None = Field(default=None, description="What fails while questions are answered: a reranker.")


@router.get("/healthz", operation_id="healthz", response_model=Health, tags=["health"])
@router.get("/livez", operation_id="livez", response_model=Health, tags=["health"])
async def live() -> Health:
    """Return that the process is alive, whether or not the model is loaded."""
    return Health(status="live")


@router.get(
    "/health",
    operation_id="health",
    response_model=Readiness,
    response_model_exclude_none=True,
    responses=OPENAI.responses(503),
    tags=["health"],
)
@router.get(
    "/readyz",
    operation_id="readyz",
    response_model=Readiness,
    response_model_exclude_none=True,
    responses=OPENAI.responses(503),
    tags=["health"],
)
async def ready(service: ReadyService) -> Readiness:
    """Return that the model is loaded and verified, and which rerankers fail; otherwise 503 with the reason."""
    return Readiness(status="ready", detail=service.reranker_health.describe_failing())


@router.get("/metrics", operation_id="metrics", response_class=PlainTextResponse, tags=["metrics"])
async def metrics(request: Request, service: ServiceState) -> Response:
    """Return the metrics in the text format, or in OpenMetrics if the client accepts it."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    # In a thread: a tier may ask its store what it holds.
    text = await anyio.to_thread.run_sync(encode, service.metrics.registry)
    return Response(text, headers={"content-type": media_type})
