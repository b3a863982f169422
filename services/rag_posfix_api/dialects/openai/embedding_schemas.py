"""Schemas of OpenAI's embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, Tag

from rag_posfix_api.dialects.documents import Forms
from rag_posfix_api.dialects.ranges import VISIBLE
from rag_posfix_api.dialects.strict import Count, RequestModel

__all__ = ["EmbeddingList", "EmbeddingObject", "EmbeddingRequest", "EmbeddingUsage"]


class EmbeddingRequest(RequestModel):
    """The texts to embed. Other fields of OpenAI's API have no effect here."""

    input: Annotated[
        Annotated[str, Tag("string"), Field(json_schema_extra=VISIBLE)]
        | Annotated[
            list[Annotated[str, Field(json_schema_extra=VISIBLE)]],
            Field(min_length=1, fail_fast=True),
            Tag("array"),
        ],
        Forms("string", "array"),
    ] = Field(description="A text, or several; not empty. Lists of token ids are refused.")
    model: str | None = Field(default=None, description="The embedding model, or 'default'.")
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="'base64' gives the bytes of little-endian 32-bit floats."
    )
    dimensions: Count | None = Field(default=None, description="The length of the model's vectors; no other one.")


class EmbeddingObject(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Token counts, with the tokenizer of the served model."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The vectors, in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
