"""POST /score and /v1/score; vLLM's answer to /rerank."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_posfix_api.dialects.documents import document_text
from rag_posfix_api.dialects.openai.errors import errors
from rag_posfix_api.dialects.reranking import document_id, rank
from rag_posfix_api.dialects.statuses import SCORING
from rag_posfix_api.dialects.vllm.schemas import (
    ScoreEntry,
    ScoreRequest,
    ScoreResponse,
    VllmDocument,
    VllmRerankRequest,
    VllmRerankResponse,
    VllmResult,
    VllmUsage,
)
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.encoding import SafeJSONResponse
from rag_posfix_api.http.facts import Facts, RequestFacts
from rag_posfix_api.runtime.service import ReadyService, Service

__all__ = ["reranked", "router"]

router = APIRouter(tags=["rerank"], route_class=CleanRoute)

_ERRORS = errors(*SCORING)


async def reranked(body: VllmRerankRequest, request: Request, service: Service, facts: Facts) -> VllmRerankResponse:
    """Return the answer to a rerank request of vLLM's clients."""
    scored = await rank(service, request, facts, body.query, body.documents)
    results = [
        VllmResult(
            index=index,
            document=VllmDocument(text=document_text(body.documents[index]), id=document_id(body.documents[index])),
            relevance_score=score,
        )
        for index, score in scored.ranked[: body.top_n or None]
    ]
    identity = f"rerank-{service.identifiers.new()}"
    return VllmRerankResponse(
        id=identity, model=service.embedding_model_id, usage=_usage(scored.tokens), results=results
    )


@router.post("/v1/score", operation_id="score_v1", response_model=ScoreResponse, responses=_ERRORS)
@router.post("/score", operation_id="score", response_model=ScoreResponse, responses=_ERRORS)
async def score(body: ScoreRequest, request: Request, service: ReadyService, facts: RequestFacts) -> Response:
    """Score one text against others, in the order of the request."""
    scored = await rank(service, request, facts, body.text_1, body.documents, "text_2")
    data = [ScoreEntry(index=index, score=score) for index, score in sorted(scored.ranked)]
    response = ScoreResponse(
        id=f"score-{service.identifiers.new()}",
        created=int(time.time()),
        model=service.embedding_model_id,
        data=data,
        usage=_usage(scored.tokens),
    )
    return SafeJSONResponse(response.model_dump())


def _usage(tokens: int) -> VllmUsage:
    return VllmUsage(prompt_tokens=tokens, total_tokens=tokens)
