"""Schemas of Cohere's rerank API, version 2."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from rag_posfix_api.dialects.documents import DocumentInput
from rag_posfix_api.dialects.strict import Count, RequestModel

__all__ = ["CohereMeta", "CohereRerankRequest", "CohereRerankResponse", "CohereResult"]


class CohereRerankRequest(RequestModel):
    """A query and the documents to score. Other fields of Cohere's API have no effect here."""

    model: str | None = Field(default=None, description="Read over: one reranker is served.")
    query: str = Field(json_schema_extra={"pattern": r"\S"})
    documents: Annotated[list[DocumentInput], Field(fail_fast=True)]
    top_n: Count | None = Field(default=None, description="How many to return; all without it.")


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
