"""/v1/collections: create, list and delete collections of the caller's tenant, their documents, search, precompute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi import Path as PathParameter
from langchain_core.documents import Document

from rag_posfix_api.collections.store import NAME_PATTERN, CollectionInfo
from rag_posfix_api.dialects.documents import check_count
from rag_posfix_api.dialects.native.collection_schemas import (
    AddDocuments,
    AddedDocuments,
    CollectionList,
    CollectionObject,
    Deleted,
    FoundDocument,
    NewCollection,
    NewDocument,
    Precompute,
    PrecomputeStatus,
    SearchRequest,
    SearchResults,
)
from rag_posfix_api.dialects.openai.errors import errors
from rag_posfix_api.dialects.posfix import mitigation_choice
from rag_posfix_api.http.auth import CALLER
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.errors import InvalidRequestError, NotFoundError
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.runtime.precompute import PrecomputeState
from rag_posfix_api.runtime.service import ReadyService, Service, ServiceState

__all__ = ["router"]

T = TypeVar("T")

router = APIRouter(tags=["collections"], route_class=CleanRoute, prefix="/v1/collections")

Name = Annotated[str, PathParameter(pattern=NAME_PATTERN)]


@router.post(
    "",
    operation_id="create_collection",
    response_model=CollectionObject,
    status_code=201,
    responses=errors(400, 401, 403, 409, 413, 422, 429, 500, 503),
)
async def create_collection(body: NewCollection, service: ReadyService) -> CollectionObject:
    """Create an empty collection of the caller's tenant."""
    make = partial(service.collections.create, CALLER.get().tenant, body.name, service.embeddings)
    return _shown(await anyio.to_thread.run_sync(make))


@router.get("", operation_id="list_collections", response_model=CollectionList, responses=errors(401, 403, 429, 500))
async def list_collections(service: ServiceState) -> CollectionList:
    """List the collections of the caller's tenant, by name."""
    found = await anyio.to_thread.run_sync(service.collections.of, CALLER.get().tenant)
    return CollectionList(data=[_shown(info) for info in found])


@router.get(
    "/{name}",
    operation_id="retrieve_collection",
    response_model=CollectionObject,
    responses=errors(401, 403, 404, 422, 429, 500),
)
async def retrieve_collection(name: Name, service: ServiceState) -> CollectionObject:
    """Describe a collection."""
    return _shown(await anyio.to_thread.run_sync(service.collections.info, CALLER.get().tenant, name))


@router.delete(
    "/{name}",
    operation_id="delete_collection",
    response_model=Deleted,
    responses=errors(400, 401, 403, 404, 422, 429, 500, 503),
)
async def delete_collection(name: Name, service: ReadyService) -> Deleted:
    """Delete a collection with its documents, and what is cached of them."""
    await anyio.to_thread.run_sync(service.delete_collection, name)
    return Deleted(id=name, deleted=True)


@router.post(
    "/{name}/documents",
    operation_id="add_documents",
    response_model=AddedDocuments,
    responses=errors(400, 401, 403, 404, 413, 422, 429, 500, 503, 504),
)
async def add_documents(
    name: Name, body: AddDocuments, request: Request, service: ReadyService, facts: RequestFacts
) -> AddedDocuments:
    """Add documents, all or none; those with known ids are replaced. The response follows when they are on the disk.

    The same request again changes nothing and costs no embedding.
    """
    check_count(len(body.documents), service.limits.max_documents)
    facts.documents = len(body.documents)
    documents = [_document(document, index) for index, document in enumerate(body.documents)]
    collection = service.collection(name)
    put = await _with_embeddings(service, request, lambda: collection.put(documents))
    return AddedDocuments(**asdict(put))


@router.delete(
    "/{name}/documents/{document_id:path}",
    operation_id="delete_document",
    response_model=Deleted,
    responses=errors(400, 401, 403, 404, 422, 429, 500, 503),
)
async def delete_document(name: Name, document_id: str, service: ReadyService) -> Deleted:
    """Delete a document, and what is cached of it. The response follows when that is on the disk."""
    collection = service.collection(name)
    if not await anyio.to_thread.run_sync(collection.delete, [document_id]):
        raise NotFoundError("the collection has no document with this id", param="document_id")
    return Deleted(id=document_id, deleted=True)


@router.post(
    "/{name}/search",
    operation_id="search_collection",
    response_model=SearchResults,
    responses=errors(400, 401, 403, 404, 413, 422, 429, 500, 503, 504),
)
async def search_collection(
    name: Name, body: SearchRequest, request: Request, service: ReadyService, facts: RequestFacts
) -> SearchResults:
    """Return the documents nearest to a query by embeddings, best first."""
    if not body.query.strip():
        raise InvalidRequestError("query is empty; give at least one visible character", param="query")
    collection = service.collection(name)
    found = await _with_embeddings(service, request, lambda: collection.search(body.query, body.k))
    return SearchResults(data=[_found(document) for document in found])


@router.post(
    "/{name}/precompute",
    operation_id="start_precompute",
    response_model=PrecomputeStatus,
    status_code=202,
    responses=errors(400, 401, 403, 404, 409, 413, 422, 429, 500, 503),
)
async def start_precompute(name: Name, body: Precompute, service: ReadyService) -> PrecomputeStatus:
    """Compute the keys and values of all documents in the background, so that the first question is fast."""
    return _status(service.precompute(name, mitigation_choice(body.mitigation)))


@router.get(
    "/{name}/precompute",
    operation_id="retrieve_precompute",
    response_model=PrecomputeStatus,
    responses=errors(401, 403, 404, 422, 429, 500),
)
async def retrieve_precompute(name: Name, service: ServiceState) -> PrecomputeStatus:
    """Return how far the last job of a collection is. Jobs are known to the process that runs them."""
    return _status(service.precomputing.state(await _existing(service, name)))


@router.delete(
    "/{name}/precompute",
    operation_id="cancel_precompute",
    response_model=PrecomputeStatus,
    responses=errors(401, 403, 404, 422, 429, 500),
)
async def cancel_precompute(name: Name, service: ServiceState) -> PrecomputeStatus:
    """End the job of a collection after its current batch. What was computed stays."""
    return _status(service.precomputing.cancel(await _existing(service, name)))


async def _existing(service: Service, name: str) -> tuple[str, str]:
    """Return the tenant and the name of a collection of the caller; 404 without one."""
    tenant = CALLER.get().tenant
    await anyio.to_thread.run_sync(service.collections.info, tenant, name)
    return tenant, name


async def _with_embeddings(service: Service, request: Request, work: Callable[[], T]) -> T:
    """Run ``work`` in a thread while nothing else embeds or reranks; stop when the client leaves."""
    with service.rerank.open() as job:
        return await job.until_gone(request.receive, lambda: job.permitted(work))


def _document(given: NewDocument, index: int) -> Document:
    if not given.text.strip():
        raise InvalidRequestError(f"documents[{index}].text is empty; give visible text", param="documents")
    titled = {} if given.title is None else {"title": given.title}
    return Document(id=given.id, page_content=given.text, metadata=given.metadata | titled)


def _found(document: Document) -> FoundDocument:
    metadata = dict(document.metadata)
    score = float(metadata.pop("relevance_score"))
    title = metadata.pop("title") if isinstance(metadata.get("title"), str) else None
    return FoundDocument(id=str(document.id), text=document.page_content, title=title, metadata=metadata, score=score)


def _shown(info: CollectionInfo) -> CollectionObject:
    return CollectionObject(name=info.name, created_at=info.created_at, documents=info.documents)


def _status(state: PrecomputeState | None) -> PrecomputeStatus:
    return PrecomputeStatus(**asdict(state or PrecomputeState("none")))
