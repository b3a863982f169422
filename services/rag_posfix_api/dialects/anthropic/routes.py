"""POST /v1/messages."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_posfix_api.dialects.answering import respond
from rag_posfix_api.dialects.anthropic.errors import errors
from rag_posfix_api.dialects.anthropic.parse import to_question
from rag_posfix_api.dialects.anthropic.render import MessageRenderer
from rag_posfix_api.dialects.anthropic.schemas import AnthropicRequest, AnthropicResponse
from rag_posfix_api.dialects.statuses import ANSWERING, STREAMED
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.runtime.service import ReadyService

__all__ = ["PATH", "router"]

PATH = "/v1/messages"

router = APIRouter(tags=["chat"], route_class=CleanRoute)


@router.post(
    PATH,
    operation_id="create_message",
    response_model=AnthropicResponse,
    responses=errors(*ANSWERING) | STREAMED,
)
async def create_message(
    body: AnthropicRequest, request: Request, service: ReadyService, facts: RequestFacts
) -> Response:
    """Answer the last message from the document blocks of the request, or from retrieved passages."""
    service.check_model(body.model)
    question, documents = to_question(body, service.pipeline.defaults.sampling, service.limits.max_documents)
    renderer = MessageRenderer(service.identifiers.new(), service.model_id, documents)
    return await respond(service, request, facts, question, renderer, stream=bool(body.stream), added=body.posfix)
