"""Collections of the caller's tenant: create, list and delete them, their documents, search, precompute."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi import Path as PathParameter
from langchain_core.documents import Document
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from rag_posfix.contracts.retrieval import combine_filters
from rag_posfix_api.collections.collection import MAX_METADATA, MAX_TEXT, metadata_size
from rag_posfix_api.collections.store import NAME_PATTERN
from rag_posfix_api.dialects.requests import (
    MetadataFilter,
    Mitigation,
    Passages,
    RequestModel,
    check_count,
    mitigation_choice,
    within,
)
from rag_posfix_api.http.auth import CALLER
from rag_posfix_api.http.errors import OPENAI, RequestError
from rag_posfix_api.http.middleware import CleanRoute, SafeJSONResponse, encode_json
from rag_posfix_api.runtime.jobs import PrecomputeState
from rag_posfix_api.runtime.service import ReadyCall, ReadyService, Service, ServiceState


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


_ID = r"^(?!\.{1,2}$)[^\x00-\x1f\x7f-\x9f]+$"
"""Ids that a URL can name: routes end at a line break, and clients take the segments "." and ".." out of a path."""


def _deletable(document_id: str) -> str:
    if re.fullmatch(_ID.strip("^$"), document_id) is None:
        raise PydanticCustomError(
            "document_id", "could not be deleted by its URL; use neither control characters nor '.' or '..' alone"
        )
    return document_id


def _storable(metadata: dict[str, Any]) -> dict[str, Any]:
    """Reject long metadata, and NaN and infinite numbers, which Python's parser reads and JSON cannot hold."""
    values: list[Any] = [metadata]
    while values:
        value = values.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise PydanticCustomError(
                "finite", "has the number {number}, which JSON cannot hold; use null", {"number": str(value)}
            )
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if (size := metadata_size(metadata)) > MAX_METADATA:
        limits = {"size": size, "most": MAX_METADATA}
        raise PydanticCustomError("metadata_size", "has {size} characters as JSON, at most {most} are allowed", limits)
    return metadata


class NewDocument(RequestModel):
    """A document to add."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_deletable)] | None = Field(
        default=None,
        description="Without it, a hash of title, text and metadata. No control characters, not '.' or '..'.",
        json_schema_extra=within(pattern=_ID),
    )
    text: str = Field(min_length=1, max_length=MAX_TEXT, json_schema_extra={"pattern": r"\S"})
    title: str | None = Field(default=None, max_length=1000)
    metadata: Annotated[dict[str, Any], AfterValidator(_storable)] = Field(
        default_factory=dict, description=f"At most {MAX_METADATA} characters as JSON."
    )


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
    passages: int = Field(description="Number of passages of the collection.")
    split: dict[str, int] = Field(
        description="Documents of the request that are longer than a passage, with their numbers of passages."
    )


class Deleted(BaseModel):
    """What was deleted."""

    id: str
    deleted: bool
    pending: int | None = Field(
        default=None,
        description="Deleted documents whose cached answers other processes may still give, for about two seconds, or "
        "until Redis works. Absent when there are none.",
    )


class SearchRequest(RequestModel):
    """A search."""

    model_config = ConfigDict(extra="forbid")

    query: str = Field(json_schema_extra={"pattern": r"\S"})
    k: Passages = 10
    filter: MetadataFilter | None = Field(default=None, description="Find documents whose metadata matches.")


class FoundDocument(BaseModel):
    """A document and its relevance, 0 to 1."""

    id: str
    text: str | None = Field(description="Its text; null where that is switched off (``source_text``).")
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

    mitigation: Mitigation | None = Field(
        default=None, description="A method that reads passages independently; the default method if null."
    )


class PrecomputeStatus(BaseModel):
    """How far a job is."""

    status: Literal["none", "queued", "running", "done", "cancelled", "failed"] = Field(
        description="'none' if no job was started since the service was."
    )
    done: int = Field(description="Documents whose keys and values are stored.")
    documents: int = Field(description="Documents to read; 0 until they were counted.")
    tokens: int | None = Field(description="Tokens that had to be computed; known at the end.")
    error: str | None


router = APIRouter(tags=["collections"], route_class=CleanRoute, prefix="/v1/collections")

Name = Annotated[str, PathParameter(pattern=NAME_PATTERN)]


@router.post("", status_code=201, responses=OPENAI.responses(400, 401, 403, 409, 413, 422, 429, 500, 503))
async def create_collection(body: NewCollection, service: ReadyService) -> CollectionObject:
    """Create an empty collection of the caller's tenant."""
    make = partial(service.collections.create, CALLER.get().tenant, body.name, service.embeddings)
    return CollectionObject(**asdict(await anyio.to_thread.run_sync(make)))


@router.get("", responses=OPENAI.responses(401, 403, 429, 500))
async def list_collections(service: ServiceState) -> CollectionList:
    """List the collections of the caller's tenant, by name."""
    infos = await anyio.to_thread.run_sync(service.collections.of, CALLER.get().tenant)
    return CollectionList(data=[CollectionObject(**asdict(info)) for info in infos])


@router.get("/{name}", responses=OPENAI.responses(401, 403, 404, 422, 429, 500))
async def retrieve_collection(name: Name, service: ServiceState) -> CollectionObject:
    """Describe a collection."""
    info = await anyio.to_thread.run_sync(service.collections.info, CALLER.get().tenant, name)
    return CollectionObject(**asdict(info))


@router.delete(
    "/{name}", response_model_exclude_none=True, responses=OPENAI.responses(400, 401, 403, 404, 422, 429, 500, 503)
)
async def delete_collection(name: Name, service: ReadyService) -> Deleted:
    """Delete a collection with its documents, and what is cached of them."""
    await anyio.to_thread.run_sync(service.delete_collection, name)
    return Deleted(id=name, deleted=True, pending=service.pipeline.pending_deletions or None)


@router.post("/{name}/documents", responses=OPENAI.responses(400, 401, 403, 404, 413, 422, 429, 500, 503, 504))
async def add_documents(name: Name, body: AddDocuments, call: ReadyCall) -> AddedDocuments:
    """Add documents, all or none; those with known ids are replaced. The response follows when they are on the disk.

    The same request again changes nothing and costs no embedding. A document that is longer than a passage (150 words
    or 1,000 characters) is stored as passages, which a search finds one by one: `ID#1`, `ID#2`, with `document_id` in
    their metadata, and the headings above them in their title. They are replaced and deleted by the document's id.
    """
    service = call.service
    check_count(len(body.documents), service.limits.max_documents)
    call.fields.documents = len(body.documents)
    documents = [_document(document, index) for index, document in enumerate(body.documents)]
    collection = service.collection(name)
    put = await call.score(lambda: collection.put(documents, service.rerank.yield_to_waiters))
    return AddedDocuments(**asdict(put))


@router.delete(
    "/{name}/documents/{document_id:path}",
    response_model_exclude_none=True,
    responses=OPENAI.responses(400, 401, 403, 404, 422, 429, 500, 503),
)
async def delete_document(name: Name, document_id: str, request: Request, service: ReadyService) -> Deleted:
    """Delete a document, and what is cached of it. The response follows when that is on the disk."""
    collection = service.collection(name)
    # The pattern of the route matches before a line break at the end, which is then not in document_id.
    is_complete = request.scope["path"].endswith(f"/{document_id}")
    if not is_complete or not await anyio.to_thread.run_sync(collection.delete, [document_id]):
        raise RequestError("the collection has no document with this id", param="document_id", code="not_found")
    return Deleted(id=document_id, deleted=True, pending=service.pipeline.pending_deletions or None)


@router.post(
    "/{name}/search",
    response_model=SearchResults,
    responses=OPENAI.responses(400, 401, 403, 404, 413, 422, 429, 500, 503, 504),
)
async def search_collection(name: Name, body: SearchRequest, call: ReadyCall) -> Response:
    """Return the documents nearest to a query by embeddings, best first; 413 if they are too many bytes."""
    if not body.query.strip():
        raise RequestError("query is empty; give at least one visible character", param="query")
    collection = call.service.collection(name)
    metadata_filter = combine_filters(CALLER.get().filter, body.filter)
    limits = call.service.limits

    def search() -> bytes:
        hits = collection.search(body.query, body.k, metadata_filter)
        return _encode_hits(hits, limits.max_body_bytes, with_text=limits.source_text)

    return SafeJSONResponse(await call.score(search))


@router.post(
    "/{name}/precompute", status_code=202, responses=OPENAI.responses(400, 401, 403, 404, 409, 413, 422, 429, 500, 503)
)
async def start_precompute(name: Name, body: Precompute, service: ReadyService) -> PrecomputeStatus:
    """Compute the keys and values of all documents in the background, so that the first question is fast."""
    return _status(service.precompute(name, mitigation_choice(body.mitigation)))


@router.get("/{name}/precompute", responses=OPENAI.responses(401, 403, 404, 422, 429, 500))
async def retrieve_precompute(name: Name, service: ServiceState) -> PrecomputeStatus:
    """Return how far the last job of a collection is. Jobs are known to the process that runs them."""
    return _status(service.precomputing.state(await _resolve_collection(service, name)))


@router.delete("/{name}/precompute", responses=OPENAI.responses(401, 403, 404, 422, 429, 500))
async def cancel_precompute(name: Name, service: ServiceState) -> PrecomputeStatus:
    """End the job of a collection after its current batch. What was computed stays."""
    return _status(service.precomputing.cancel(await _resolve_collection(service, name)))


async def _resolve_collection(service: Service, name: str) -> tuple[str, str]:
    """Return the tenant and the name of a collection of the caller; 404 without one."""
    tenant = CALLER.get().tenant
    await anyio.to_thread.run_sync(service.collections.info, tenant, name)
    return tenant, name


def _document(document: NewDocument, index: int) -> Document:
    if not document.text.strip():
        raise RequestError(f"documents[{index}].text is empty; give visible text", param="documents")
    title = {} if document.title is None else {"title": document.title}
    return Document(id=document.id, page_content=document.text, metadata=document.metadata | title)


def _encode_hits(hits: Sequence[Document], max_bytes: int, *, with_text: bool) -> bytes:
    """Return the response with the documents; raise for one of more than ``max_bytes`` before it is complete."""
    encoded, size = [], 0
    for document in hits:
        encoded.append(encode_json(_found_document(document, with_text=with_text).model_dump()))
        size += len(encoded[-1])
        if size > max_bytes:
            raise RequestError(
                f"the first {len(encoded)} of {len(hits)} documents have {size} bytes, at most {max_bytes} are "
                f"allowed; ask with k={max(len(encoded) - 1, 1)} or less, or store less metadata",
                param="k",
                code="response_too_large",
            )
    return b'{"object":"list","data":[%b]}' % b",".join(encoded)


def _found_document(document: Document, *, with_text: bool) -> FoundDocument:
    metadata = dict(document.metadata)
    score = float(metadata.pop("relevance_score"))
    title = metadata.pop("title") if isinstance(metadata.get("title"), str) else None
    text = document.page_content if with_text else None
    return FoundDocument(id=str(document.id), text=text, title=title, metadata=metadata, score=score)


def _status(state: PrecomputeState | None) -> PrecomputeStatus:
    return PrecomputeStatus(**asdict(state or PrecomputeState("none")))
