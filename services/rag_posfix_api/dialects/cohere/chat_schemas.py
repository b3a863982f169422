"""Schemas of Cohere's chat API, version 2."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from rag_posfix_api.dialects.documents import DocumentInput
from rag_posfix_api.dialects.messages import EXAMPLE, Message
from rag_posfix_api.dialects.posfix import PosfixInput
from rag_posfix_api.dialects.provenance import Provenance
from rag_posfix_api.dialects.ranges import within
from rag_posfix_api.dialects.strict import Integer, RequestModel, Seed, StopList

__all__ = [
    "CohereChatRequest",
    "CohereChatResponse",
    "CohereCitation",
    "CohereMessage",
    "CohereSource",
    "CohereText",
    "CohereTokens",
    "CohereUsage",
    "FinishReason",
]

FinishReason = Literal["COMPLETE", "MAX_TOKENS"]


class CitationOptions(RequestModel):
    """Options of citations."""

    mode: str | None = Field(default=None, description="'OFF' or 'DISABLED' gives none; every other mode is the same.")


class CohereChatRequest(RequestModel):
    """A request. Fields of Cohere's API without effect here are ignored; ``parse`` refuses unsupported ones."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(examples=["default"], description="The served model, or 'default'.")
    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(
        min_length=1, examples=[EXAMPLE], description="The last one must be the user's: it is the question."
    )
    documents: Annotated[list[DocumentInput], Field(fail_fast=True)] | None = Field(
        default=None, description="The passages to answer from. Without any they are retrieved."
    )
    citation_options: CitationOptions | None = None
    # Ranges that the pipeline checks, with status 400: `json_schema_extra` tells them and checks nothing.
    max_tokens: Integer | None = Field(default=None, json_schema_extra=within(minimum=1))
    temperature: FiniteFloat | None = Field(default=None, json_schema_extra=within(minimum=0, maximum=5))
    p: FiniteFloat | None = Field(default=None, json_schema_extra=within(exclusiveMinimum=0, maximum=1))
    k: Integer | None = Field(
        default=None, json_schema_extra=within(minimum=0), description="Samples from this many tokens."
    )
    seed: Seed | None = None
    stop_sequences: StopList | None = None
    stream: bool | None = None
    posfix: PosfixInput | None = Field(default=None, description="What this service adds to Cohere's API.")

    @property
    def cites(self) -> bool:
        """Whether the answer has citations."""
        mode = self.citation_options.mode if self.citation_options is not None else None
        return (mode or "").upper() not in ("OFF", "DISABLED")


class CohereSource(BaseModel):
    """A document that is cited, with the fields that the request gave it."""

    type: Literal["document"] = "document"
    id: str
    document: dict[str, Any]


class CohereCitation(BaseModel):
    """A span of the answer, in code points, and its sources."""

    start: int
    end: int
    text: str
    sources: list[CohereSource]
    content_index: int = 0
    type: Literal["TEXT_CONTENT"] = "TEXT_CONTENT"


class CohereText(BaseModel):
    """The text of the answer."""

    type: Literal["text"] = "text"
    text: str


class CohereMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: list[CohereText]
    citations: list[CohereCitation] | None


class CohereTokens(BaseModel):
    """Token counts."""

    input_tokens: int
    output_tokens: int


class CohereUsage(BaseModel):
    """Token counts; the same ones as Cohere would bill them."""

    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int


class CohereChatResponse(BaseModel):
    """A complete answer."""

    id: str
    finish_reason: FinishReason
    message: CohereMessage
    usage: CohereUsage
    posfix: Provenance = Field(description="What this service adds to Cohere's API.")
