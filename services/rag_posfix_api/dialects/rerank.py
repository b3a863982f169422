"""Rerank and score: bodies of Jina, Cohere (versions 1 and 2), vLLM and Text Embeddings Inference (TEI)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from langchain_core.documents import Document
from pydantic import AliasChoices, BaseModel, Discriminator, Field, Tag
from starlette.responses import Response

from rag_posfix.caching.answers.tiered import tenant_salt
from rag_posfix.cancellation import check_cancelled
from rag_posfix.contracts.request import salted
from rag_posfix.contracts.retrieval import DETAILS, QUESTION_TOO_LONG, rerank_indexed
from rag_posfix.errors import PromptTooLongError, RerankingError
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix_api.dialects.embeddings import TokenUsage, count_tokens
from rag_posfix_api.dialects.requests import (
    DocumentObject,
    Documents,
    Forms,
    Natural,
    RequestModel,
    check_count,
    document_text,
)
from rag_posfix_api.http.errors import COHERE, JINA, OPENAI, SCORING, TEI, RequestError
from rag_posfix_api.http.middleware import CleanRoute, SafeJSONResponse
from rag_posfix_api.runtime.service import Call, ReadyCall

_log = logging.getLogger(__name__)

JINA_PATH, COHERE_PATH, TEI_PATH = "/v1/rerank", "/v2/rerank", "/rerank"

jina, cohere, vllm, tei = (APIRouter(tags=["rerank"], route_class=CleanRoute) for _ in range(4))


Ranking = list[tuple[int, float]]
"""(Index in the request, relevance), best first; equal scores keep the order of the request."""


async def rank(
    call: Call,
    query: str,
    documents: Sequence[str | DocumentObject],
    param: str = "documents",
) -> tuple[Ranking, int]:
    """Return the scores of documents, and the tokens of query and documents as ``count_tokens`` counts them.

    Scores that are all equal are logged and counted: a scorer that cannot tell documents apart is usually broken. The
    work stops when the client leaves. ``param`` is the field of the documents.

    Raises:
        RequestError: the query is blank, there are too many documents, or the pipeline has no reranker.
        PromptTooLongError: the query is longer than the reranker can read.
        RerankingError: the reranker scored nothing.
    """
    service = call.service
    check_count(len(documents), service.limits.max_documents, param)
    if not query.strip():
        raise RequestError("query is empty; give at least one visible character", param="query")
    call.fields.documents = len(documents)
    score = partial(_score, service.pipeline, query, [document_text(document) for document in documents])
    ranking, tokens = await call.score(score)
    if len(ranking) > 1 and ranking[0][1] == ranking[-1][1]:
        service.metrics.tied_rankings.inc()
        _log.warning("reranking: all %d documents have the same score; check the reranker", len(documents))
    return ranking, tokens


def _score(pipeline: Pipeline, query: str, texts: Sequence[str]) -> tuple[Ranking, int]:
    if pipeline.reranker is None:
        raise RequestError("this server has no reranker; serve a pipeline with one to rerank", code="unsupported")
    documents = [Document(page_content=text) for text in texts]
    with salted(tenant_salt(pipeline.defaults.tenant)), pipeline.tracer.stage("reranker", query, documents) as stage:
        reranked = rerank_indexed(pipeline.reranker, query, documents)
        check_cancelled()  # not each scorer works in steps
        stage.on_result([entry.document for entry in reranked])
    ranking = []
    for entry in reranked:
        score = entry.document.metadata.get("relevance_score")
        if score is None:
            if entry.document.metadata.get(DETAILS, {}).get(QUESTION_TOO_LONG):
                raise PromptTooLongError("query is longer than the reranker can read; shorten it")
            raise RerankingError("the reranker failed, or was late, and scored nothing; its log line says which")
        ranking.append((entry.index, float(score)))
    tokens = count_tokens(pipeline.generator.encoder, (query, *texts))
    return sorted(ranking, key=lambda scored: (-scored[1], scored[0])), tokens


def _id(document: str | DocumentObject) -> str | None:
    return None if isinstance(document, str) else document.id


class CohereRerankRequest(RequestModel):
    """A query and the documents to score. Other fields of Cohere's API have no effect here."""

    model: str | None = Field(default=None, description="Read over: one reranker is served.")
    query: str = Field(json_schema_extra={"pattern": r"\S"})
    documents: Documents
    top_n: Natural | None = Field(default=None, description="How many to return; all without it, and for 0.")


class RerankRequest(CohereRerankRequest):
    """A query and the documents to score."""

    return_documents: bool | None = None


class RerankDocument(BaseModel):
    """The document that was scored."""

    text: str
    id: str | None = None


class RerankResult(BaseModel):
    """A document's score."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(BaseModel):
    """Scores, best first: the form of Jina and vLLM. Cohere's version 1 has ``id`` and ``results`` as well."""

    id: str
    model: str
    results: list[RerankResult]
    usage: TokenUsage


@jina.post(JINA_PATH, response_model=RerankResponse, responses=JINA.responses(*SCORING))
async def rerank(body: RerankRequest, call: ReadyCall) -> Response:
    """Score documents for a query, best first; documents with equal scores stay in the order of the request."""
    ranking, tokens = await rank(call, body.query, body.documents)
    results = []
    for index, score in ranking[: body.top_n or None]:
        document = RerankDocument(text=document_text(body.documents[index]), id=_id(body.documents[index]))
        output = document if body.return_documents is not False else None
        results.append(RerankResult(index=index, relevance_score=score, document=output))
    response = RerankResponse(
        id=f"rerank-{call.service.identifiers.new()}",
        model=call.service.embedding_model_id,
        results=results,
        usage=TokenUsage(prompt_tokens=tokens, total_tokens=tokens),
    )
    return SafeJSONResponse(response.model_dump(exclude_none=True))


class CohereResult(BaseModel):
    """A document's score."""

    index: int
    relevance_score: float
    id: str | None = Field(default=None, description="The id that the request gave the document.")


class CohereVersion(BaseModel):
    """The version of the API."""

    version: Literal["2"] = "2"


class CohereUnits(BaseModel):
    """What Cohere would bill."""

    search_units: int = 1


class CohereMeta(BaseModel):
    """The version of the API and what was used."""

    api_version: CohereVersion = Field(default_factory=CohereVersion)
    billed_units: CohereUnits = Field(default_factory=CohereUnits)


class CohereRerankResponse(BaseModel):
    """Scores, best first."""

    id: str
    results: list[CohereResult]
    meta: CohereMeta = Field(default_factory=CohereMeta)


@cohere.post(COHERE_PATH, summary="Rerank", response_model=CohereRerankResponse, responses=COHERE.responses(*SCORING))
async def cohere_rerank(body: CohereRerankRequest, call: ReadyCall) -> Response:
    """Score documents for a query, best first."""
    ranking, _ = await rank(call, body.query, body.documents)
    results = [
        CohereResult(index=index, relevance_score=score, id=_id(body.documents[index]))
        for index, score in ranking[: body.top_n or None]
    ]
    response = CohereRerankResponse(id=call.service.identifiers.new(), results=results)
    return SafeJSONResponse(response.model_dump(exclude_none=True))


_Texts = Annotated[
    Annotated[str, Tag("string")] | Annotated[Documents, Tag("array")],
    Forms("string", "array"),
]


class ScoreRequest(RequestModel):
    """A text and the texts to score it against. One text on the left; several are not supported."""

    model: str | None = Field(default=None, description="Read over: one reranker is served.")
    text_1: str = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"), json_schema_extra={"pattern": r"\S"}
    )
    text_2: _Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))

    @property
    def documents(self) -> list[Any]:
        """The texts on the right."""
        return [self.text_2] if isinstance(self.text_2, str) else list(self.text_2)


class ScoreEntry(BaseModel):
    """The score of a text."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(BaseModel):
    """Scores, in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreEntry]
    usage: TokenUsage


@vllm.post("/v1/score", operation_id="score_v1", response_model=ScoreResponse, responses=OPENAI.responses(*SCORING))
@vllm.post("/score", response_model=ScoreResponse, responses=OPENAI.responses(*SCORING))
async def score(body: ScoreRequest, call: ReadyCall) -> Response:
    """Score one text against others, in the order of the request."""
    ranking, tokens = await rank(call, body.text_1, body.documents, "text_2")
    response = ScoreResponse(
        id=f"score-{call.service.identifiers.new()}",
        created=int(time.time()),
        model=call.service.embedding_model_id,
        data=[ScoreEntry(index=index, score=score) for index, score in sorted(ranking)],
        usage=TokenUsage(prompt_tokens=tokens, total_tokens=tokens),
    )
    return SafeJSONResponse(response.model_dump())


class TeiRerankRequest(RequestModel):
    """A query and the texts to score."""

    query: str = Field(json_schema_extra={"pattern": r"\S"})
    texts: Annotated[list[str], Field(fail_fast=True)]
    raw_scores: bool | None = Field(default=None, description="Without effect: scores are those of the reranker.")
    return_text: bool | None = None
    truncate: bool | None = Field(default=None, description="Without effect: a scorer truncates to its window.")
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None


class TeiRank(BaseModel):
    """A text's score."""

    index: int
    score: float
    text: str | None = None


def _form(body: Any) -> str:
    if isinstance(body, dict):
        return "form:vllm" if "documents" in body else "form:tei"
    return "form:vllm" if isinstance(body, RerankRequest) else "form:tei"


Body = Annotated[
    Annotated[TeiRerankRequest, Tag("form:tei")] | Annotated[RerankRequest, Tag("form:vllm")], Discriminator(_form)
]
"""TEI's body has ``texts`` and is answered with a list; vLLM's has ``documents``."""


@tei.post(TEI_PATH, summary="Rerank", response_model=list[TeiRank] | RerankResponse, responses=TEI.responses(*SCORING))
async def tei_rerank(body: Body, call: ReadyCall) -> Response:
    """Score texts for a query, best first."""
    if isinstance(body, RerankRequest):
        return await rerank(body, call)
    ranking, _ = await rank(call, body.query, body.texts, "texts")
    ranks = [
        TeiRank(index=index, score=score, text=body.texts[index] if body.return_text else None)
        for index, score in ranking
    ]
    return SafeJSONResponse([entry.model_dump(exclude_none=True) for entry in ranks])
