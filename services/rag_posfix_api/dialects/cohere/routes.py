"""POST /v2/chat and POST /v2/rerank."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_posfix_api.dialects.answering import respond
from rag_posfix_api.dialects.cohere.chat_schemas import CohereChatRequest, CohereChatResponse
from rag_posfix_api.dialects.cohere.errors import errors
from rag_posfix_api.dialects.cohere.parse import to_question
from rag_posfix_api.dialects.cohere.render import ChatRenderer
from rag_posfix_api.dialects.cohere.schemas import CohereRerankRequest, CohereRerankResponse, CohereResult
from rag_posfix_api.dialects.reranking import document_id, rank
from rag_posfix_api.dialects.statuses import ANSWERING, SCORING, STREAMED
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.encoding import SafeJSONResponse
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.runtime.service import ReadyService

__all__ = ["CHAT_PATH", "RERANK_PATH", "router"]

CHAT_PATH = "/v2/chat"
RERANK_PATH = "/v2/rerank"

router = APIRouter()

chats = APIRouter(tags=["chat"], route_class=CleanRoute)
reranks = APIRouter(tags=["rerank"], route_class=CleanRoute)


@chats.post(
    CHAT_PATH,
    operation_id="cohere_chat",
    response_model=CohereChatResponse,
    responses=errors(*ANSWERING) | STREAMED,
)
async def chat(body: CohereChatRequest, request: Request, service: ReadyService, facts: RequestFacts) -> Response:
    """Answer the last message from documents: those of the request, or retrieved ones, with citations."""
    service.check_model(body.model)
    question, documents = to_question(body, service.pipeline.defaults.sampling, service.limits.max_documents)
    renderer = ChatRenderer(service.identifiers.new(), documents, cites=body.cites)
    return await respond(service, request, facts, question, renderer, stream=bool(body.stream), added=body.posfix)


@reranks.post(
    RERANK_PATH,
    operation_id="cohere_rerank",
    response_model=CohereRerankResponse,
    responses=errors(*SCORING),
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


router.include_router(chats)
router.include_router(reranks)
