"""Schemas of Jina's rerank API."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from rag_posfix_api.dialects.documents import DocumentInput
from rag_posfix_api.dialects.strict import Count, RequestModel

__all__ = ["RerankDocument", "RerankRequest", "RerankResponse", "RerankResult", "RerankUsage"]


class RerankRequest(RequestModel):
    """A query and the documents to score."""

    model: str | None = Field(default=None, description="Read over: one reranker is served.")
    query: str = Field(json_schema_extra={"pattern": r"\S"})
    documents: Annotated[list[DocumentInput], Field(fail_fast=True)]
    top_n: Count | None = Field(default=None, description="How many to return; all without it.")
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


class RerankUsage(BaseModel):
    """Tokens of query and documents, counted with the served model's tokenizer."""

    total_tokens: int
    prompt_tokens: int


class RerankResponse(BaseModel):
    """Scores, best first. Cohere's version 1 has ``id`` and ``results`` as well."""

    id: str
    model: str
    results: list[RerankResult]
    usage: RerankUsage
