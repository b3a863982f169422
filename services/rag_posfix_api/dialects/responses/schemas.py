"""Schemas of OpenAI's responses API: text in, text out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Tag

from rag_posfix_api.dialects.documents import DocumentInput, Forms
from rag_posfix_api.dialects.posfix import PosfixInput
from rag_posfix_api.dialects.provenance import Provenance
from rag_posfix_api.dialects.ranges import VISIBLE, needs, within
from rag_posfix_api.dialects.strict import Integer, RequestModel

__all__ = [
    "InputItem",
    "OutputMessage",
    "OutputText",
    "ResponseError",
    "ResponseObject",
    "ResponseUsage",
    "ResponsesRequest",
]


class InputPart(RequestModel):
    """A part of a message; only text is supported."""

    model_config = ConfigDict(extra="allow", json_schema_extra=needs("text", {"type": "string"}))

    type: str = Field(default="input_text", json_schema_extra={"enum": ["input_text", "output_text", "text"]})
    text: str | None = None


class InputItem(RequestModel):
    """A message of the conversation."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra=needs("role", {"type": "string", "enum": ["system", "developer", "user", "assistant"]}),
    )

    type: str = Field(default="message", json_schema_extra={"enum": ["message"]})
    role: str | None = None
    content: (
        Annotated[
            Annotated[str, Tag("string")] | Annotated[list[InputPart], Field(fail_fast=True), Tag("array")],
            Forms("string", "array"),
        ]
        | None
    ) = None


class ResponsesRequest(RequestModel):
    """A request. Fields of OpenAI's API without effect here are ignored; ``parse`` refuses unsupported ones."""

    model_config = ConfigDict(extra="allow")

    input: Annotated[
        Annotated[str, Tag("string"), Field(json_schema_extra=VISIBLE)]
        | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("array")],
        Forms("string", "array"),
    ] = Field(description="The question, or a conversation that ends with it.")
    model: str | None = Field(default=None, description="The served model, or 'default'.")
    instructions: str | None = None
    # Ranges that the pipeline checks, with status 400: `json_schema_extra` tells them and checks nothing.
    max_output_tokens: Integer | None = Field(default=None, json_schema_extra=within(minimum=1))
    temperature: FiniteFloat | None = Field(default=None, json_schema_extra=within(minimum=0, maximum=5))
    top_p: FiniteFloat | None = Field(default=None, json_schema_extra=within(exclusiveMinimum=0, maximum=1))
    stream: bool | None = None
    documents: Annotated[list[DocumentInput], Field(fail_fast=True)] | None = Field(
        default=None, description="The passages to answer from. Without the field they are retrieved."
    )
    posfix: PosfixInput | None = Field(default=None, description="What this service adds to OpenAI's API.")


class OutputText(BaseModel):
    """The text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class OutputMessage(BaseModel):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class InputTokensDetails(BaseModel):
    """Details of input tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """Details of output tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = Field(default_factory=OutputTokensDetails)
    total_tokens: int


class ResponseError(BaseModel):
    """Why a stream failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class TextFormat(BaseModel):
    """The format of the answer."""

    type: Literal["text"] = "text"


class TextOptions(BaseModel):
    """Options of the answer's text."""

    format: TextFormat = Field(default_factory=TextFormat)


class ResponseObject(BaseModel):
    """An answer, complete or not."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: TextOptions = Field(default_factory=TextOptions)
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = Field(default_factory=list)
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    posfix: Provenance | None = Field(default=None, description="What this service adds to OpenAI's API.")
