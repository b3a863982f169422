"""Schemas of vLLM's rerank and score APIs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field, Tag

from rag_posfix_api.dialects.documents import DocumentInput, Forms
from rag_posfix_api.dialects.strict import Natural, RequestModel

__all__ = [
    "ScoreEntry",
    "ScoreRequest",
    "ScoreResponse",
    "VllmDocument",
    "VllmRerankRequest",
    "VllmRerankResponse",
    "VllmResult",
    "VllmUsage",
]


class VllmRerankRequest(RequestModel):
    """A query and the documents to score."""

    model: str | None = Field(default=None, description="Read over: one reranker is served.")
    query: str = Field(json_schema_extra={"pattern": r"\S"})
    documents: Annotated[list[DocumentInput], Field(fail_fast=True)]
    top_n: Natural | None = Field(default=None, description="How many to return; all without it, and for 0.")


class VllmDocument(BaseModel):
    """The document that was scored."""

    text: str
    id: str | None = None


class VllmResult(BaseModel):
    """A document's score."""

    index: int
    document: VllmDocument
    relevance_score: float


class VllmUsage(BaseModel):
    """Tokens of query and documents, counted with the served model's tokenizer."""

    prompt_tokens: int
    total_tokens: int


class VllmRerankResponse(BaseModel):
    """Scores, best first."""

    id: str
    model: str
    usage: VllmUsage
    results: list[VllmResult]


_Texts = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[DocumentInput], Field(fail_fast=True), Tag("array")],
    Forms("string", "array"),
]


class ScoreRequest(RequestModel):
    """A text and the texts to score it against. One text on the left; several are not supported."""

    model: str | None = Field(default=None, description="Read over: one reranker is served.")
    text_1: str = Field(
        validation_alias=AliasChoices("text_1", "queries", "data_1"), json_schema_extra={"pattern": r"\S"}
    )
    text_2: _Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))

    @property
    def documents(self) -> list[Any]:
        """The texts on the right."""
        return [self.text_2] if isinstance(self.text_2, str) else list(self.text_2)


class ScoreEntry(BaseModel):
    """The score of a text."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(BaseModel):
    """Scores, in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreEntry]
    usage: VllmUsage
