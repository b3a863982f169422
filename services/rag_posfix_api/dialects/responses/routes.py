"""POST /v1/responses. Errors are those of OpenAI's chat."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_posfix_api.dialects.answering import respond
from rag_posfix_api.dialects.openai.errors import errors
from rag_posfix_api.dialects.responses.parse import to_question
from rag_posfix_api.dialects.responses.render import ResponseRenderer
from rag_posfix_api.dialects.responses.schemas import ResponseObject, ResponsesRequest
from rag_posfix_api.dialects.statuses import ANSWERING, STREAMED
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.runtime.service import ReadyService

__all__ = ["router"]

router = APIRouter(tags=["chat"], route_class=CleanRoute)


@router.post(
    "/v1/responses",
    operation_id="create_response",
    response_model=ResponseObject,
    responses=errors(*ANSWERING) | STREAMED,
)
async def create_response(
    body: ResponsesRequest, request: Request, service: ReadyService, facts: RequestFacts
) -> Response:
    """Answer the input from documents: those of the request, or retrieved ones. Responses are not stored."""
    service.check_model(body.model or "")
    defaults = service.pipeline.defaults.sampling
    question = to_question(body, defaults, service.limits.max_documents)
    identity, sampling = service.identifiers.new(), question.sampling or defaults
    renderer = ResponseRenderer(identity, service.model_id, sampling, body.instructions)
    return await respond(service, request, facts, question, renderer, stream=bool(body.stream), added=body.posfix)
