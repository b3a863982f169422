"""Probes: /livez says that the process answers, /readyz that it can answer questions."""

from __future__ import annotations

from fastapi import APIRouter

from services.api.routes.responses import errors
from services.api.schemas.models import Health
from services.api.service import ReadyService

__all__ = ["router"]

router = APIRouter(tags=["health"])


@router.get("/healthz", operation_id="healthz", response_model=Health)
@router.get("/livez", operation_id="livez", response_model=Health)
async def live() -> Health:
    """Say that the process is alive, whether or not the model is loaded."""
    return Health(status="live")


@router.get("/health", operation_id="health", response_model=Health, responses=errors(503))
@router.get("/readyz", operation_id="readyz", response_model=Health, responses=errors(503))
async def ready(service: ReadyService) -> Health:
    """Say that the model is loaded and verified; 503 with the reason otherwise."""
    return Health(status="ready")
