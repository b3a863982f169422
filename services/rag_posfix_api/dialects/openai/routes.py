"""POST /v1/chat/completions, /v1/completions and /v1/embeddings, GET /v1/models and GET /v1/models/{model}."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_posfix_api.dialects.answering import respond
from rag_posfix_api.dialects.openai import completions, embeddings
from rag_posfix_api.dialects.openai.errors import errors
from rag_posfix_api.dialects.openai.parse import to_question
from rag_posfix_api.dialects.openai.render import Completion
from rag_posfix_api.dialects.openai.schemas import ChatCompletion, ChatRequest, ModelList, ModelObject
from rag_posfix_api.dialects.statuses import ANSWERING, STREAMED
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.runtime.service import ReadyService, Service

__all__ = ["router"]

router = APIRouter()


chat = APIRouter(tags=["chat"], route_class=CleanRoute)
models = APIRouter(tags=["models"])


@chat.post(
    "/v1/chat/completions",
    operation_id="create_chat_completion",
    response_model=ChatCompletion,
    responses=errors(*ANSWERING) | STREAMED,
)
async def create_chat_completion(
    body: ChatRequest, request: Request, service: ReadyService, facts: RequestFacts
) -> Response:
    """Answer the last message from documents: those of the request, or retrieved ones.

    With ``stream`` the answer is sent as server-sent events; the last chunk before the usage has the sources.
    """
    service.check_model(body.model or "")
    question = to_question(body, service.pipeline.defaults.sampling, service.limits.max_documents)
    usage = bool(body.stream_options and body.stream_options.include_usage)
    identity, fingerprint = service.identifiers.new(), service.pipeline.generator.fingerprint
    completion = Completion(
        identity, service.model_id, fingerprint, include_usage=usage, log_probs=bool(body.logprobs)
    )
    return await respond(service, request, facts, question, completion, stream=bool(body.stream), added=body.posfix)


@models.get("/v1/models", operation_id="list_models", response_model=ModelList, responses=errors(401, 403, 500, 503))
async def list_models(service: ReadyService) -> ModelList:
    """List the served model."""
    return ModelList(data=[_model(service)])


@models.get(
    "/v1/models/{model:path}",  # ids of the form owner/name hold a slash
    operation_id="retrieve_model",
    response_model=ModelObject,
    responses=errors(401, 403, 404, 422, 500, 503),
)
async def retrieve_model(model: str, service: ReadyService) -> ModelObject:
    """Describe the served model."""
    service.check_model(model)
    return _model(service)


def _model(service: Service) -> ModelObject:
    return ModelObject(
        id=service.model_id, created=service.started, max_model_len=service.pipeline.generator.context_window
    )


router.include_router(chat)
router.include_router(completions.router)
router.include_router(embeddings.router)
router.include_router(models)
