"""POST /v1/rerank, for clients of Jina and of Cohere's version 1."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_posfix_api.dialects.jina.errors import errors
from rag_posfix_api.dialects.jina.render import to_response
from rag_posfix_api.dialects.jina.schemas import RerankRequest, RerankResponse
from rag_posfix_api.dialects.reranking import rank
from rag_posfix_api.dialects.statuses import SCORING
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.encoding import SafeJSONResponse
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.runtime.service import ReadyService

__all__ = ["PATH", "router"]

PATH = "/v1/rerank"

router = APIRouter(tags=["rerank"], route_class=CleanRoute)


@router.post(
    PATH,
    operation_id="rerank",
    response_model=RerankResponse,
    responses=errors(*SCORING),
)
async def rerank(body: RerankRequest, request: Request, service: ReadyService, facts: RequestFacts) -> Response:
    """Score documents for a query, best first; documents with equal scores stay in the order of the request."""
    scored = await rank(service, request, facts, body.query, body.documents)
    response = to_response(scored, body, service.identifiers.new(), service.embedding_model_id)
    return SafeJSONResponse(response.model_dump(exclude_none=True))
