"""POST /v1/rerank."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_posfix_api.dialects.documents import check_count, document_text
from rag_posfix_api.dialects.jina.errors import errors
from rag_posfix_api.dialects.jina.render import to_response
from rag_posfix_api.dialects.jina.schemas import RerankRequest, RerankResponse
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.encoding import SafeJSONResponse
from rag_posfix_api.http.errors import InvalidRequestError
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.runtime.rerank import score_texts
from rag_posfix_api.runtime.service import ReadyService

__all__ = ["PATH", "router"]

PATH = "/v1/rerank"

router = APIRouter(tags=["rerank"], route_class=CleanRoute)


@router.post(
    PATH,
    operation_id="rerank",
    response_model=RerankResponse,
    responses=errors(400, 401, 413, 422, 429, 500, 503),
)
async def rerank(body: RerankRequest, request: Request, service: ReadyService, facts: RequestFacts) -> Response:
    """Score documents for a query, best first; documents with equal scores stay in the order of the request."""
    check_count(len(body.documents), service.limits.max_documents)
    if not body.query.strip():
        raise InvalidRequestError("query is empty; give at least one visible character", param="query")
    facts.documents = len(body.documents)
    texts = [document_text(document) for document in body.documents]
    score = partial(score_texts, service.pipeline, body.query, texts)
    with service.rerank.open() as job:
        scored = await job.until_gone(request.receive, lambda: job.permitted(score))
    response = to_response(scored, body, texts, service.settings.embedding_model)
    return SafeJSONResponse(response.model_dump(exclude_none=True))
