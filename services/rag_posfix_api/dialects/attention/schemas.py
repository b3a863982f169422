"""Schemas of POST /v1/posfix/attention."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rag_posfix_api.dialects.documents import DocumentInput
from rag_posfix_api.dialects.provenance import DroppedOutput
from rag_posfix_api.dialects.strict import RequestModel

__all__ = ["AttentionRequest", "AttentionResponse", "PassageShare"]


class AttentionRequest(RequestModel):
    """A question and the passages of its prompt."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = Field(default=None, description="The served model, or 'default'.")
    query: str = Field(json_schema_extra={"pattern": r"\S"}, description="The question.")
    documents: Annotated[list[DocumentInput], Field(fail_fast=True)]
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
