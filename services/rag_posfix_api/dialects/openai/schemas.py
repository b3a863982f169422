"""Schemas of OpenAI's chat completions and models, with additional fields for documents and mitigations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Tag, model_validator

from rag_posfix_api.dialects.documents import DocumentInput, Forms

__all__ = [
    "ChatCompletion",
    "ChatRequest",
    "Choice",
    "CitationOutput",
    "DocumentOutput",
    "DroppedOutput",
    "Message",
    "MessageOutput",
    "MitigationInput",
    "ModelList",
    "ModelObject",
    "Part",
    "PosfixInput",
    "PromptTokensDetails",
    "Provenance",
    "UsageOutput",
]


MAX_FIELDS = 16


def _within(**limits: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds limits to the schema of an optional number."""

    def add(schema: dict[str, Any]) -> None:
        for member in schema["anyOf"]:
            if member["type"] != "null":
                member |= limits

    return add


class Part(BaseModel):
    """A part of a message; only text is supported."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(default="text", json_schema_extra={"enum": ["text"]})
    text: str | None = None


class Message(BaseModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(json_schema_extra={"enum": ["system", "developer", "user", "assistant"]})
    content: (
        Annotated[
            Annotated[str, Tag("string")] | Annotated[list[Part], Field(fail_fast=True), Tag("array")],
            Forms("string", "array"),
        ]
        | None
    ) = None


class MitigationInput(BaseModel):
    """A mitigation and its parameters."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        # Each unknown field would be an error of its own.
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ValueError(f"{len(given)} fields are given; a mitigation has 'name' and 'parameters'")
        return given


class PosfixInput(BaseModel):
    """What this service adds to OpenAI's API, in one object; the same fields beside ``messages`` do the same."""

    model_config = ConfigDict(extra="forbid")

    mitigation: (
        Annotated[Annotated[str, Tag("string")] | Annotated[MitigationInput, Tag("object")], Forms("string", "object")]
        | None
    ) = Field(default=None, description="A mitigation by name, or with its parameters.")
    order: str | None = Field(default=None, description="The order that the passages stand in.")
    k: int | None = Field(default=None, ge=1, le=1000, description="How many passages to retrieve.")


class StreamOptions(BaseModel):
    """Options of streaming."""

    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """A request. Fields of OpenAI's API without effect here are ignored; ``parse`` refuses unsupported ones."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(
        min_length=1, description="The last one must be the user's: it is the question."
    )
    model: str | None = Field(default=None, description="The served model, or 'default'.")
    # Ranges that the pipeline checks, with status 400: `json_schema_extra` tells them and checks nothing.
    temperature: FiniteFloat | None = Field(default=None, json_schema_extra=_within(minimum=0, maximum=5))
    top_p: FiniteFloat | None = Field(default=None, json_schema_extra=_within(exclusiveMinimum=0, maximum=1))
    top_k: int | None = Field(default=None, json_schema_extra=_within(minimum=0))
    max_tokens: int | None = Field(default=None, json_schema_extra=_within(minimum=1))
    max_completion_tokens: int | None = Field(default=None, json_schema_extra=_within(minimum=1))
    stop: (
        Annotated[
            Annotated[str, Tag("string")] | Annotated[list[str], Field(fail_fast=True), Tag("array")],
            Forms("string", "array"),
        ]
        | None
    ) = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="Seeds sampling and the order 'random'.")
    n: int | None = Field(default=None, json_schema_extra=_within(enum=[1]))
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    documents: Annotated[list[DocumentInput], Field(fail_fast=True)] | None = Field(
        default=None,
        description="The passages to answer from. Without the field they are retrieved, where an index is served; an "
        "empty list answers without passages.",
    )
    mitigation: (
        Annotated[Annotated[str, Tag("string")] | Annotated[MitigationInput, Tag("object")], Forms("string", "object")]
        | None
    ) = Field(default=None, description="A mitigation by name, or with its parameters.")
    order: str | None = Field(default=None, description="The order that the passages stand in.")
    k: int | None = Field(default=None, ge=1, le=1000, description="How many passages to retrieve.")
    posfix: PosfixInput | None = Field(default=None, description="``mitigation``, ``order`` and ``k`` in one object.")
    cache: bool | None = Field(default=None, description="False neither reads nor writes the answer cache.")


class MessageOutput(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    """The one answer."""

    index: int = 0
    message: MessageOutput
    logprobs: None = None
    finish_reason: str


class PromptTokensDetails(BaseModel):
    """Details of prompt tokens."""

    cached_tokens: int


class UsageOutput(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class DocumentOutput(BaseModel):
    """A passage in the prompt."""

    id: str
    score: float | None
    position: int
    attention: float


class CitationOutput(BaseModel):
    """A span of the answer and its source documents."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    start: int
    end: int
    text: str
    document_ids: list[str]
    origin: Literal["quote", "attention"] = Field(
        alias="from",
        description="How that is known: 'quote', they hold the text word for word; 'attention', one of them dominated "
        "the attention while the sentence was written.",
    )


class DroppedOutput(BaseModel):
    """A document that is not in the prompt, and the reason."""

    id: str
    reason: str


class Provenance(BaseModel):
    """The sources of an answer: the fields that this service adds to OpenAI's format."""

    documents: list[DocumentOutput]
    citations: list[CitationOutput]
    dropped: list[DroppedOutput]
    mitigation: str
    order: str
    cached: bool
    timings: dict[str, float]


class ChatCompletion(Provenance):
    """A complete answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageOutput
    system_fingerprint: str


class ModelObject(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rag-posfix"
    max_model_len: int


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[ModelObject]
