"""Schemas of Ollama's chat and tags."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from rag_posfix_api.dialects.documents import DocumentInput
from rag_posfix_api.dialects.messages import EXAMPLE, Message
from rag_posfix_api.dialects.posfix import PosfixInput
from rag_posfix_api.dialects.provenance import Provenance
from rag_posfix_api.dialects.ranges import within
from rag_posfix_api.dialects.strict import Integer, RequestModel, Seed, StopStrings

__all__ = ["OllamaChatRequest", "OllamaChatResponse", "OllamaMessage", "OllamaModel", "OllamaModels", "OllamaOptions"]


class OllamaOptions(RequestModel):
    """Sampling parameters. Other options of Ollama have no effect here."""

    model_config = ConfigDict(extra="ignore")

    temperature: FiniteFloat | None = Field(default=None, json_schema_extra=within(minimum=0, maximum=5))
    top_p: FiniteFloat | None = Field(default=None, json_schema_extra=within(exclusiveMinimum=0, maximum=1))
    top_k: Integer | None = Field(default=None, json_schema_extra=within(minimum=0))
    seed: Seed | None = None
    num_predict: Integer | None = Field(
        default=None, description="Most tokens of the answer; 0 and less give the service's default."
    )
    stop: StopStrings | None = None


class OllamaChatRequest(RequestModel):
    """A request. Fields of Ollama's API without effect here are ignored; ``parse`` refuses unsupported ones."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(examples=["default"], description="The served model, or 'default'; ':latest' may follow.")
    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(
        min_length=1, examples=[EXAMPLE], description="The last one must be the user's: it is the question."
    )
    stream: bool | None = Field(default=None, description="False gives one object; otherwise lines of JSON.")
    options: OllamaOptions | None = None
    documents: Annotated[list[DocumentInput], Field(fail_fast=True)] | None = Field(
        default=None, description="The passages to answer from. Without the field they are retrieved."
    )
    posfix: PosfixInput | None = Field(default=None, description="What this service adds to Ollama's API.")


class OllamaMessage(BaseModel):
    """The answer, or a piece of it."""

    role: Literal["assistant"] = "assistant"
    content: str


class OllamaChatResponse(BaseModel):
    """A piece of an answer; the last one is done, and has the counts and times (in nanoseconds)."""

    model: str
    created_at: str
    message: OllamaMessage
    done: bool
    done_reason: Literal["stop", "length"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    posfix: Provenance | None = Field(default=None, description="What this service adds to Ollama's API.")


class OllamaModel(BaseModel):
    """A served model."""

    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str
    details: dict[str, str]


class OllamaModels(BaseModel):
    """The served models."""

    models: list[OllamaModel]
