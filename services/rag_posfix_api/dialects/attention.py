"""Attention: how much the unmodified model attends to each passage. A format of this service."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from rag_posfix_api.dialects.answering import DroppedOutput
from rag_posfix_api.dialects.errors import OPENAI
from rag_posfix_api.dialects.requests import Documents, RequestModel, to_documents
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.encoding import SafeJSONResponse
from rag_posfix_api.http.errors import InvalidRequestError
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.runtime.passage_attention import Attended, attention_shares
from rag_posfix_api.runtime.service import ReadyService


class AttentionRequest(RequestModel):
    """A question and the passages of its prompt."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = Field(default=None, description="The served model, or 'default'.")
    query: str = Field(json_schema_extra={"pattern": r"\S"}, description="The question.")
    documents: Documents
    order: str = Field(default="original", description="The order that the passages stand in; as they are given.")


class PassageShare(BaseModel):
    """A passage in the prompt."""

    id: str
    position: int
    attention: float = Field(description="Share of the attention to passages, 0 to 1.")


class AttentionResponse(BaseModel):
    """The attention of the prompt's last token to each passage, in the order of the prompt."""

    object: Literal["posfix.attention"] = "posfix.attention"
    model: str
    documents: list[PassageShare]
    dropped: list[DroppedOutput]
    prompt_tokens: int


PATH = "/v1/posfix/attention"

router = APIRouter(tags=["attention"], route_class=CleanRoute)


@router.post(
    PATH,
    operation_id="passage_attention",
    response_model=AttentionResponse,
    responses=OPENAI.responses(400, 401, 403, 404, 413, 422, 429, 500, 503, 504),
)
async def passage_attention(
    body: AttentionRequest, request: Request, service: ReadyService, facts: RequestFacts
) -> Response:
    """Return each passage's share of the attention of the prompt's last token. Nothing is generated.

    A generator that gives no attention, such as a remote one, is refused with 400 and the code ``unsupported``.
    """
    service.check_model(body.model or "")
    if not body.query.strip():
        raise InvalidRequestError("query is empty; give at least one visible character", param="query")
    documents = to_documents(body.documents, service.limits.max_documents)
    facts.documents = len(documents)
    measure = partial(attention_shares, service.pipeline, service.reader, body.query, documents, body.order)
    with service.rerank.open() as job:
        attended = await job.until_gone(request.receive, lambda: job.permitted(measure))
    facts.order, facts.tokens = attended.order, {"prompt": attended.tokens}
    return SafeJSONResponse(_response(attended, service.model_id).model_dump())


def _response(attended: Attended, model: str) -> AttentionResponse:
    measured = enumerate(zip(attended.ids, attended.shares, strict=True))
    return AttentionResponse(
        model=model,
        documents=[PassageShare(id=name, position=place, attention=share) for place, (name, share) in measured],
        dropped=[DroppedOutput(id=name, reason=reason) for name, reason in attended.dropped],
        prompt_tokens=attended.tokens,
    )
