"""POST /v2/rerank."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_posfix_api.dialects.cohere.errors import errors
from rag_posfix_api.dialects.cohere.schemas import CohereRerankRequest, CohereRerankResponse, CohereResult
from rag_posfix_api.dialects.reranking import document_id, rank
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.encoding import SafeJSONResponse
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.runtime.service import ReadyService

__all__ = ["PATH", "router"]

PATH = "/v2/rerank"

router = APIRouter(tags=["rerank"], route_class=CleanRoute)


@router.post(
    PATH,
    operation_id="cohere_rerank",
    response_model=CohereRerankResponse,
    responses=errors(400, 401, 413, 422, 429, 500, 503),
)
async def rerank(body: CohereRerankRequest, request: Request, service: ReadyService, facts: RequestFacts) -> Response:
    """Score documents for a query, best first."""
    scored = await rank(service, request, facts, body.query, body.documents)
    results = [
        CohereResult(index=index, relevance_score=score, id=document_id(body.documents[index]))
        for index, score in scored.ranked[: body.top_n]
    ]
    response = CohereRerankResponse(id=service.identifiers.new(), results=results)
    return SafeJSONResponse(response.model_dump(exclude_none=True))
