"""Schemas of OpenAI's chat completions and models, with additional fields for documents and mitigations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Tag

from rag_posfix.contracts.token_scores import MOST_ALTERNATIVES
from rag_posfix_api.dialects.documents import DocumentInput, Forms
from rag_posfix_api.dialects.messages import EXAMPLE, Message
from rag_posfix_api.dialects.posfix import MitigationInput, PosfixInput
from rag_posfix_api.dialects.provenance import Provenance
from rag_posfix_api.dialects.ranges import within
from rag_posfix_api.dialects.strict import Integer, Passages, RequestModel, Seed, StopStrings

__all__ = [
    "AnswerTokenLogProb",
    "ChatCompletion",
    "ChatRequest",
    "Choice",
    "ChoiceLogProbs",
    "MessageOutput",
    "ModelList",
    "ModelObject",
    "PromptTokensDetails",
    "TokenLogProb",
    "UsageOutput",
]


class StreamOptions(RequestModel):
    """Options of streaming."""

    include_usage: bool | None = None


_ALTERNATIVES_NEED_LOGPROBS: dict[str, Any] = {
    "anyOf": [
        {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}},
        {"properties": {"top_logprobs": {"anyOf": [{"const": 0}, {"type": "null"}]}}},
    ]
}


class ChatRequest(RequestModel):
    """A request. Fields of OpenAI's API without effect here are ignored; ``parse`` refuses unsupported ones."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_ALTERNATIVES_NEED_LOGPROBS)

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(
        min_length=1, examples=[EXAMPLE], description="The last one must be the user's: it is the question."
    )
    model: str | None = Field(default=None, examples=["default"], description="The served model, or 'default'.")
    # Ranges that the pipeline checks, with status 400: `json_schema_extra` tells them and checks nothing.
    temperature: FiniteFloat | None = Field(default=None, json_schema_extra=within(minimum=0, maximum=5))
    top_p: FiniteFloat | None = Field(default=None, json_schema_extra=within(exclusiveMinimum=0, maximum=1))
    top_k: Integer | None = Field(default=None, json_schema_extra=within(minimum=0))
    max_tokens: Integer | None = Field(default=None, json_schema_extra=within(minimum=1))
    max_completion_tokens: Integer | None = Field(default=None, json_schema_extra=within(minimum=1))
    stop: StopStrings | None = None
    seed: Seed | None = Field(default=None, description="Seeds sampling and the order 'random'.")
    n: Integer | None = Field(default=None, json_schema_extra=within(enum=[1]))
    logprobs: bool | None = Field(default=None, description="Whether the tokens come with their log-probabilities.")
    top_logprobs: Integer | None = Field(
        default=None,
        json_schema_extra=within(minimum=0, maximum=MOST_ALTERNATIVES),
        description="Likeliest tokens in the place of each token; needs ``logprobs``.",
    )
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
    k: Passages | None = Field(default=None, description="How many passages to retrieve.")
    posfix: PosfixInput | None = Field(default=None, description="``mitigation``, ``order`` and ``k`` in one object.")
    cache: bool | None = Field(default=None, description="False neither reads nor writes the answer cache.")


class MessageOutput(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class TokenLogProb(BaseModel):
    """A token and its log-probability, at least -9999."""

    token: str = Field(description=r"Bytes that are no complete characters are written as \xNN.")
    logprob: float
    bytes: list[int]


class AnswerTokenLogProb(TokenLogProb):
    """A token of the answer, and the likeliest tokens in its place."""

    top_logprobs: list[TokenLogProb]


class ChoiceLogProbs(BaseModel):
    """The tokens of the answer, or of a piece of it."""

    content: list[AnswerTokenLogProb]
    refusal: None = None


class Choice(BaseModel):
    """The one answer."""

    index: int = 0
    message: MessageOutput
    logprobs: ChoiceLogProbs | None = None
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
