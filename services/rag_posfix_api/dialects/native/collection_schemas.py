"""Schemas of collections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag

from rag_posfix_api.collections.store import NAME_PATTERN
from rag_posfix_api.dialects.documents import Forms
from rag_posfix_api.dialects.posfix import MitigationInput
from rag_posfix_api.dialects.strict import Passages, RequestModel

__all__ = [
    "AddDocuments",
    "AddedDocuments",
    "CollectionList",
    "CollectionObject",
    "Deleted",
    "FoundDocument",
    "NewCollection",
    "NewDocument",
    "Precompute",
    "PrecomputeStatus",
    "SearchRequest",
    "SearchResults",
]


class NewCollection(RequestModel):
    """A collection to create."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=NAME_PATTERN)


class CollectionObject(BaseModel):
    """A collection."""

    name: str
    object: Literal["collection"] = "collection"
    created_at: int
    documents: int


class CollectionList(BaseModel):
    """The collections of the caller's tenant, by name."""

    object: Literal["list"] = "list"
    data: list[CollectionObject]


class NewDocument(RequestModel):
    """A document to add."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(
        default=None, min_length=1, max_length=256, description="Without it, a hash of title, text and metadata."
    )
    text: str = Field(min_length=1)
    title: str | None = Field(default=None, max_length=1000)
    metadata: dict[str, Any] = Field(default_factory=dict)


class AddDocuments(RequestModel):
    """Documents to add, or to replace by id."""

    model_config = ConfigDict(extra="forbid")

    documents: Annotated[list[NewDocument], Field(fail_fast=True)] = Field(min_length=1)


class AddedDocuments(BaseModel):
    """What became of the documents. They are on the disk."""

    ids: list[str]
    added: int
    replaced: int
    unchanged: int
    documents: int = Field(description="Number of documents of the collection.")


class Deleted(BaseModel):
    """What was deleted."""

    id: str
    deleted: bool


class SearchRequest(RequestModel):
    """A search."""

    model_config = ConfigDict(extra="forbid")

    query: str = Field(json_schema_extra={"pattern": r"\S"})
    k: Passages = 10


class FoundDocument(BaseModel):
    """A document and its relevance, 0 to 1."""

    id: str
    text: str
    title: str | None = None
    metadata: dict[str, Any]
    score: float


class SearchResults(BaseModel):
    """The nearest documents, best first."""

    object: Literal["list"] = "list"
    data: list[FoundDocument]


class Precompute(RequestModel):
    """What is to be computed ahead."""

    model_config = ConfigDict(extra="forbid")

    mitigation: (
        Annotated[Annotated[str, Tag("string")] | Annotated[MitigationInput, Tag("object")], Forms("string", "object")]
        | None
    ) = Field(default=None, description="A method that reads passages independently; the default method if null.")


class PrecomputeStatus(BaseModel):
    """How far a job is."""

    status: Literal["none", "queued", "running", "done", "cancelled", "failed"] = Field(
        description="'none' if no job was started since the service was."
    )
    done: int = Field(description="Documents whose keys and values are stored.")
    documents: int = Field(description="Documents to read; 0 until they were counted.")
    tokens: int | None = Field(description="Tokens that had to be computed; known at the end.")
    error: str | None
