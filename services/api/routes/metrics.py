"""GET /metrics for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from services.api.service import ServiceState

__all__ = ["router"]

router = APIRouter(tags=["metrics"])


@router.get("/metrics", operation_id="metrics", response_class=PlainTextResponse)
async def metrics(request: Request, service: ServiceState) -> Response:
    """Return the metrics in the text format, or OpenMetrics where it is accepted."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(service.metrics.registry), headers={"content-type": media_type})
