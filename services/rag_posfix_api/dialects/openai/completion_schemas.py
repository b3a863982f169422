"""Schemas of OpenAI's completions: a prompt that the model continues as it is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, FiniteFloat, Tag

from rag_posfix.contracts.token_scores import MOST_ALTERNATIVES
from rag_posfix_api.dialects.openai.schemas import StreamOptions, UsageOutput
from rag_posfix_api.dialects.ranges import within
from rag_posfix_api.dialects.strict import Integer, Natural, RequestModel, Seed, StopStrings

__all__ = ["CompletionChoice", "CompletionLogProbs", "CompletionObject", "CompletionRequest"]


def _form(value: Any) -> str:
    """Return the form of a prompt by its first entry, so that errors name one form only."""
    if isinstance(value, list | tuple) and value:
        first = value[0]
        return (
            "form:lists"
            if isinstance(first, list | tuple)
            else "form:ids"
            if isinstance(first, int | float)
            else "array"
        )
    return "array" if isinstance(value, list | tuple) else "string"


_Naturals = Annotated[list[Natural], Field(min_length=1, fail_fast=True)]

Prompt = Annotated[
    Annotated[str, Field(min_length=1), Tag("string")]
    | Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=128, fail_fast=True), Tag("array")
    ]
    | Annotated[_Naturals, Tag("form:ids")]
    | Annotated[list[_Naturals], Field(min_length=1, max_length=128, fail_fast=True), Tag("form:lists")],
    Discriminator(_form),
]
"""A text, token ids, or a list of either."""


class CompletionRequest(RequestModel):
    """A request. Fields of OpenAI's API without effect here are ignored; unsupported ones are refused."""

    model_config = ConfigDict(extra="allow")

    prompt: Prompt = Field(description="One text or list of token ids, or several. No chat template is applied.")
    model: str | None = Field(default=None, description="The served model, or 'default'.")
    # Ranges that the pipeline checks, with status 400: `json_schema_extra` tells them and checks nothing.
    max_tokens: Integer | None = Field(
        default=None, json_schema_extra=within(minimum=0), description="16 without it. 0 generates nothing."
    )
    temperature: FiniteFloat | None = Field(
        default=None, json_schema_extra=within(minimum=0, maximum=5), description="0, greedy, without it."
    )
    top_p: FiniteFloat | None = Field(default=None, json_schema_extra=within(exclusiveMinimum=0, maximum=1))
    top_k: Integer | None = Field(default=None, json_schema_extra=within(minimum=0))
    stop: StopStrings | None = None
    seed: Seed | None = None
    n: Integer | None = Field(default=None, json_schema_extra=within(enum=[1]))
    best_of: Integer | None = Field(default=None, json_schema_extra=within(enum=[1]))
    echo: bool | None = Field(default=None, description="Whether the text begins with the prompt.")
    logprobs: Integer | None = Field(
        default=None,
        json_schema_extra=within(minimum=0, maximum=MOST_ALTERNATIVES),
        description="Log-probabilities of the tokens, and of so many likeliest tokens in their places; with ``echo``, "
        "of the tokens of the prompt too.",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionLogProbs(BaseModel):
    """The tokens of a completion."""

    tokens: list[str] = Field(description=r"Bytes that are no complete characters are written as bytes:\xNN.")
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int] = Field(description="Characters of the text before each token.")


class CompletionChoice(BaseModel):
    """The completion of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None


class CompletionObject(BaseModel):
    """The completions of all prompts, or a piece of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageOutput | None = None
    system_fingerprint: str
