"""Schemas of Anthropic's messages API: text, documents and citations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Tag

from rag_posfix_api.dialects.documents import Forms
from rag_posfix_api.dialects.messages import EXAMPLE
from rag_posfix_api.dialects.posfix import PosfixInput
from rag_posfix_api.dialects.provenance import Provenance
from rag_posfix_api.dialects.ranges import needs, within
from rag_posfix_api.dialects.strict import Integer, RequestModel, StopList

__all__ = [
    "AnthropicBlock",
    "AnthropicMessage",
    "AnthropicRequest",
    "AnthropicResponse",
    "AnthropicUsage",
    "BlockLocation",
    "CharLocation",
    "TextBlock",
]


def _kind(kind: str, field: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a part of one type, which needs one field."""
    return {"required": ["type", field], "properties": {"type": {"const": kind}, field: value}}


class CitationsConfig(RequestModel):
    """Whether a document may be cited."""

    enabled: bool | None = None


class SourceText(RequestModel):
    """A part of a document that is cited as a whole."""

    model_config = ConfigDict(json_schema_extra=needs("text", {"type": "string"}))

    type: str = Field(default="text", json_schema_extra={"enum": ["text"]})
    text: str | None = None


class DocumentSource(RequestModel):
    """The text of a document: ``data`` of type ``text``, or ``content`` of type ``content``."""

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra={
            "anyOf": [
                _kind("text", "data", {"type": "string"}),
                _kind("content", "content", {"type": ["string", "array"]}),
            ]
        },
    )

    type: str = Field(json_schema_extra={"enum": ["text", "content"]})
    media_type: str | None = None
    data: str | None = None
    content: (
        Annotated[
            Annotated[str, Tag("string")] | Annotated[list[SourceText], Field(fail_fast=True), Tag("array")],
            Forms("string", "array"),
        ]
        | None
    ) = None


class AnthropicBlock(RequestModel):
    """A part of a message: text, or a document to answer from."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "anyOf": [_kind("text", "text", {"type": "string"}), _kind("document", "source", {"type": "object"})]
        },
    )

    type: str = Field(json_schema_extra={"enum": ["text", "document"]})
    text: str | None = None
    source: DocumentSource | None = None
    title: str | None = None
    context: str | None = Field(default=None, description="Stands before the document's text, and is not cited.")
    citations: (
        Annotated[
            Annotated[CitationsConfig, Tag("object")] | Annotated[list[Any], Tag("array")], Forms("object", "array")
        ]
        | None
    ) = Field(default=None, description="Of a document: whether it may be cited. Of a text block: read over.")


_Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[AnthropicBlock], Field(fail_fast=True), Tag("array")],
    Forms("string", "array"),
]


class AnthropicMessage(RequestModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(json_schema_extra={"enum": ["user", "assistant"]})
    content: _Content


def _texts_only(schema: dict[str, Any]) -> None:
    """Say that instructions have no documents."""
    for member in schema["anyOf"]:
        if "oneOf" in member or "anyOf" in member or member.get("type") == "array":
            parts = {
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            }
            member.clear()
            member["anyOf"] = [{"type": "string"}, {"type": "array", "items": {"type": "object", **parts}}]


class AnthropicRequest(RequestModel):
    """A request. Fields of Anthropic's API without effect here are ignored; ``parse`` refuses unsupported ones."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(examples=["default"], description="The served model, or 'default'.")
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True)] = Field(
        min_length=1, examples=[EXAMPLE], description="The last one must be the user's: its text is the question."
    )
    # Ranges that the pipeline checks, with status 400: `json_schema_extra` tells them and checks nothing.
    max_tokens: Integer = Field(json_schema_extra={"minimum": 1})
    system: _Content | None = Field(default=None, json_schema_extra=_texts_only)
    temperature: FiniteFloat | None = Field(default=None, json_schema_extra=within(minimum=0, maximum=5))
    top_p: FiniteFloat | None = Field(default=None, json_schema_extra=within(exclusiveMinimum=0, maximum=1))
    top_k: Integer | None = Field(default=None, json_schema_extra=within(minimum=0))
    stop_sequences: StopList | None = None
    stream: bool | None = None
    posfix: PosfixInput | None = Field(default=None, description="What this service adds to Anthropic's API.")


class Location(BaseModel):
    """A passage that a text block is from, and the characters of the whole answer that it supports."""

    cited_text: str
    document_index: int = Field(description="Counts the document blocks of the request, from 0.")
    document_title: str | None
    file_id: None = None
    answer_start_index: int = Field(description="First character in the answer: all text blocks joined.")
    answer_end_index: int = Field(description="Character after the last in the answer.")


class CharLocation(Location):
    """Characters of a plain text document, counted in code points."""

    type: Literal["char_location"] = "char_location"
    start_char_index: int
    end_char_index: int


class BlockLocation(Location):
    """Blocks of a document of type ``content``."""

    type: Literal["content_block_location"] = "content_block_location"
    start_block_index: int
    end_block_index: int


class TextBlock(BaseModel):
    """A part of the answer."""

    type: Literal["text"] = "text"
    text: str
    citations: list[CharLocation | BlockLocation] | None = None


class AnthropicUsage(BaseModel):
    """Token counts. The prompt has the sum of the first two."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int


class AnthropicResponse(BaseModel):
    """A complete answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "max_tokens"]
    stop_sequence: None = None
    usage: AnthropicUsage
    posfix: Provenance = Field(description="What this service adds to Anthropic's API.")
