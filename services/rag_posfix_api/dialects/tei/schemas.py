"""Schemas of the rerank API of Text Embeddings Inference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from rag_posfix_api.dialects.strict import RequestModel

__all__ = ["TeiRank", "TeiRerankRequest"]


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
