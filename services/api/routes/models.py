"""GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

from fastapi import APIRouter

from services.api.routes.responses import errors
from services.api.schemas.models import ModelList, ModelObject
from services.api.service import ReadyService, Service

__all__ = ["router"]

router = APIRouter(tags=["models"])


@router.get("/v1/models", operation_id="list_models", response_model=ModelList, responses=errors(401, 500, 503))
async def list_models(service: ReadyService) -> ModelList:
    """List the served model."""
    return ModelList(data=[_model(service)])


@router.get(
    "/v1/models/{model:path}",  # ids of the form owner/name hold a slash
    operation_id="retrieve_model",
    response_model=ModelObject,
    responses=errors(401, 404, 422, 500, 503),
)
async def retrieve_model(model: str, service: ReadyService) -> ModelObject:
    """Describe the served model."""
    service.check_model(model)
    return _model(service)


def _model(service: Service) -> ModelObject:
    return ModelObject(
        id=service.model_id, created=service.started, max_model_len=service.pipeline.generator.context_window
    )
