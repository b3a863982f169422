"""POST /v1/rerank."""

from __future__ import annotations

from fastapi import APIRouter, Request
from langchain_core.documents import Document
from starlette.responses import Response

from rag_posfix.caching.keys import tenant_salt
from rag_posfix.errors import RerankingError
from rag_posfix.pipeline import Pipeline
from rag_posfix.tenancy import salted
from services.api.errors import InvalidRequestError, UnsupportedFeatureError
from services.api.facts import RequestFacts
from services.api.questions import check_count
from services.api.responses import SafeJSONResponse
from services.api.routes.body import CleanRoute
from services.api.routes.responses import errors
from services.api.schemas.common import document_text
from services.api.schemas.rerank import (
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankUsage,
)
from services.api.service import ReadyService

__all__ = ["router"]

router = APIRouter(tags=["rerank"], route_class=CleanRoute)

_PLACE = "_place"


@router.post(
    "/v1/rerank",
    operation_id="rerank",
    response_model=RerankResponse,
    responses=errors(400, 401, 413, 422, 429, 500, 503),
)
async def rerank(body: RerankRequest, request: Request, service: ReadyService, facts: RequestFacts) -> Response:
    """Score documents for a query, best first; equal scores keep the order of the request."""
    check_count(len(body.documents), service.limits.max_documents)
    if not body.query.strip():
        raise InvalidRequestError("query is empty; give at least one visible character", param="query")
    facts.documents = len(body.documents)
    pipeline = service.pipeline
    with service.rerank.open() as job:
        response = await job.until_gone(
            request.receive, lambda: job.permitted(lambda: _score(pipeline, body, service.settings.embedding_model))
        )
    return SafeJSONResponse(response.model_dump(exclude_none=True))


def _score(pipeline: Pipeline, body: RerankRequest, model: str) -> RerankResponse:
    if pipeline.reranker is None:
        raise UnsupportedFeatureError("this server has no reranker; serve a pipeline with one to use /v1/rerank")
    texts = [document_text(document) for document in body.documents]
    marked = [Document(page_content=text, metadata={_PLACE: place}) for place, text in enumerate(texts)]
    with salted(tenant_salt(pipeline.defaults.tenant)):
        scored = pipeline.reranker.compress_documents(marked, body.query) if marked else []
    shown = body.return_documents is not False
    results = [
        RerankResult(
            index=(place := int(document.metadata[_PLACE])),
            relevance_score=_relevance(document),
            document=RerankDocument(text=texts[place]) if shown else None,
        )
        for document in scored
    ]
    results.sort(key=lambda result: (-result.relevance_score, result.index))
    encoder = pipeline.generator.encoder
    tokens = sum(len(encoder.encode_text(text)) for text in (body.query, *texts))
    usage = RerankUsage(total_tokens=tokens, prompt_tokens=tokens)
    return RerankResponse(model=model, results=results[: body.top_n], usage=usage)


def _relevance(document: Document) -> float:
    score = document.metadata.get("relevance_score")
    if score is None:
        raise RerankingError("the reranker failed, or was late, and scored nothing; its log line says which")
    return float(score)
