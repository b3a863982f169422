"""POST /rerank: TEI's body has ``texts`` and is answered with a list; vLLM's has ``documents``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Discriminator, Tag
from starlette.responses import Response

from rag_posfix_api.dialects.reranking import rank
from rag_posfix_api.dialects.statuses import SCORING
from rag_posfix_api.dialects.tei.errors import errors
from rag_posfix_api.dialects.tei.schemas import TeiRank, TeiRerankRequest
from rag_posfix_api.dialects.vllm.routes import reranked
from rag_posfix_api.dialects.vllm.schemas import VllmRerankRequest, VllmRerankResponse
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.encoding import SafeJSONResponse
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.runtime.service import ReadyService

__all__ = ["PATH", "router"]

PATH = "/rerank"

router = APIRouter(tags=["rerank"], route_class=CleanRoute)


def _dialect(body: Any) -> str:
    if isinstance(body, dict):
        return "form:vllm" if "documents" in body else "form:tei"
    return "form:vllm" if isinstance(body, VllmRerankRequest) else "form:tei"


Body = Annotated[
    Annotated[TeiRerankRequest, Tag("form:tei")] | Annotated[VllmRerankRequest, Tag("form:vllm")],
    Discriminator(_dialect),
]


@router.post(
    PATH,
    operation_id="tei_rerank",
    response_model=list[TeiRank] | VllmRerankResponse,
    responses=errors(*SCORING),
)
async def rerank(body: Body, request: Request, service: ReadyService, facts: RequestFacts) -> Response:
    """Score texts for a query, best first."""
    if isinstance(body, VllmRerankRequest):
        response = await reranked(body, request, service, facts)
        return SafeJSONResponse(response.model_dump(exclude_none=True))
    scored = await rank(service, request, facts, body.query, body.texts, "texts")
    ranks = [
        TeiRank(index=index, score=score, text=body.texts[index] if body.return_text else None)
        for index, score in scored.ranked
    ]
    return SafeJSONResponse([one.model_dump(exclude_none=True) for one in ranks])
