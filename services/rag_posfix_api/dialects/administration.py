"""What operators use: probes and metrics, what is served, and API keys.

``/info`` shows no secret, no path, and nothing of a tenant. Keys and reloads need the scope ``admin``, which sees all
tenants.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from rag_posfix.errors import UnknownNameError
from rag_posfix_api.dialects.requests import WHOLE, MetadataFilter, RequestModel
from rag_posfix_api.http.errors import OPENAI, RequestError
from rag_posfix_api.http.middleware import MAX_DEPTH, MAX_VALUES, CleanRoute
from rag_posfix_api.keys.store import SCOPES, TENANT_PATTERN, KeyFileError
from rag_posfix_api.runtime.service import ReadyService, Service, ServiceState, package_version

_PACKAGES = ("torch", "transformers", "langchain-core", "fastapi", "faiss-cpu", "sentence-transformers")

T = TypeVar("T")

operations = APIRouter()
information = APIRouter(tags=["info"])
indexes = APIRouter(tags=["indexes"])
keys = APIRouter(tags=["keys"], route_class=CleanRoute)


class Health(BaseModel):
    """The response of a probe."""

    status: str


class Readiness(Health):
    """The response of a readiness probe."""

    detail: str | None = Field(
        default=None,
        description="What fails while questions are answered: a reranker, the files of collections, the key file, or "
        "a new index.",
    )


@operations.get("/healthz", operation_id="healthz", response_model=Health, tags=["health"])
@operations.get("/livez", operation_id="livez", tags=["health"])
async def live() -> Health:
    """Return that the process is alive, whether or not the model is loaded."""
    return Health(status="live")


@operations.get(
    "/health",
    operation_id="health",
    response_model=Readiness,
    response_model_exclude_none=True,
    responses=OPENAI.responses(503),
    tags=["health"],
)
@operations.get(
    "/readyz",
    operation_id="readyz",
    response_model_exclude_none=True,
    responses=OPENAI.responses(503),
    tags=["health"],
)
async def ready(service: ReadyService) -> Readiness:
    """Return that the model is loaded, and what fails nevertheless; otherwise 503 with the reason.

    A vector store of another program is asked, at most once a second.
    """
    await service.check_stores()
    await service.key_checker.refresh()
    details = (
        service.reranker_health.describe_failing(),
        service.collections.failures.describe(),
        service.keys.describe_failing(),
        service.indexes.describe_failing(),
    )
    return Readiness(status="ready", detail="; ".join(filter(None, details)) or None)


@operations.get("/metrics", response_class=PlainTextResponse, tags=["metrics"])
async def metrics(request: Request, service: ServiceState) -> Response:
    """Return the metrics in the text format, or in OpenMetrics if the client accepts it."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    # In a thread: a tier may query its store.
    text = await anyio.to_thread.run_sync(encode, service.metrics.registry)
    return Response(text, headers={"content-type": media_type})


class ModelInfo(BaseModel):
    """The served model."""

    id: str
    fingerprint: str
    context_window: int
    embeddings: bool
    index: bool


class Methods(BaseModel):
    """What requests can choose by name."""

    mitigations: list[str]
    orders: list[str]
    rerankers: list[str]


class DefaultsInfo(BaseModel):
    """What requests get that choose nothing."""

    mitigation: str
    order: str
    k: int
    max_tokens: int


class LimitsInfo(BaseModel):
    """The limits of requests."""

    max_body_bytes: int
    max_json_values: int
    max_json_depth: int
    max_documents: int
    max_concurrent: int
    max_queue: int
    request_timeout_seconds: float
    max_collections: int
    max_collection_documents: int


class Info(BaseModel):
    """What is served."""

    model: ModelInfo
    methods: Methods
    defaults: DefaultsInfo
    limits: LimitsInfo
    versions: dict[str, str]


@information.get("/info", operation_id="info", responses=OPENAI.responses(401, 403, 429, 500, 503))
async def info(service: ReadyService) -> Info:
    """Return the model, the methods, the limits and the versions."""
    pipeline, limits = service.pipeline, service.limits
    return Info(
        model=ModelInfo(
            id=service.model_id,
            fingerprint=pipeline.generator.fingerprint,
            context_window=pipeline.generator.context_window,
            embeddings=pipeline.embeddings is not None,
            index=pipeline.retriever is not None,
        ),
        methods=await anyio.to_thread.run_sync(_methods),
        defaults=_defaults(service),
        limits=LimitsInfo(
            max_json_values=MAX_VALUES,
            max_json_depth=MAX_DEPTH,
            **{name: getattr(limits, name) for name in LimitsInfo.model_fields if not name.startswith("max_json")},
        ),
        versions=_versions(),
    )


def _methods() -> Methods:
    """Return the names of the registries, whose modules may have to be imported first."""
    from rag_posfix.assembly.orders import ORDERS
    from rag_posfix.mitigations import MITIGATIONS
    from rag_posfix.reranking import RERANKERS

    return Methods(
        mitigations=list(MITIGATIONS.names()), orders=list(ORDERS.names()), rerankers=list(RERANKERS.names())
    )


def _defaults(service: Service) -> DefaultsInfo:
    defaults = service.pipeline.defaults
    # Without parameters: they may hold the content of a file.
    return DefaultsInfo(
        mitigation=defaults.mitigation.name,
        order=defaults.order.partition(":")[0],
        k=defaults.k,
        max_tokens=defaults.sampling.max_tokens,
    )


def _versions() -> dict[str, str]:
    versions = {"rag-posfix": package_version(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


class IndexInfo(BaseModel):
    """An index that is served from a folder."""

    name: str = Field(description='Name of the index; "" for questions that name none.')
    version: str = Field(description="Hash of the served version.")
    passages: int
    reloaded: bool = Field(description="Whether this request switched to another version.")
    error: str | None = Field(description="Why the version in the folder is not served; null if it is.")


class Reload(BaseModel):
    """The indexes after a reload; none if the service follows no folder."""

    indexes: list[IndexInfo]


@indexes.post("/v1/admin/reload", operation_id="reload", responses=OPENAI.responses(401, 403, 413, 429, 500, 503))
async def reload(service: ReadyService) -> Reload:
    """Serve the versions in the index folders now.

    Running answers keep the version that they began with. A version that cannot be read leaves the version before
    served: ``error`` has the reason, and the status is 200.
    """
    reloaded = await anyio.to_thread.run_sync(service.indexes.reload)
    served = {name: (index, index.version) for name, index in service.indexes.by_name().items()}
    return Reload(
        indexes=[
            IndexInfo(
                name=name,
                version=version.name,
                passages=version.manifest.count,
                reloaded=name in reloaded,
                error=index.failure,
            )
            for name, (index, version) in served.items()
        ]
    )


ScopeName = Literal["read", "write", "admin", "metrics"]
"""As ``keys.store.SCOPES``."""
Limit = Annotated[int, Field(ge=1, le=1_000_000), WHOLE]


class NewKey(RequestModel):
    """What a new key is to be."""

    model_config = ConfigDict(extra="forbid")

    tenant: str = Field(pattern=TENANT_PATTERN, description="Owner of what the key creates.")
    name: str = Field(
        default="",
        max_length=100,
        description="Printable text for people.",
        # The key file's own rule, with status 400, is wider: all printable characters of Unicode.
        json_schema_extra={"pattern": r"^[ -~]*$"},
    )
    scopes: list[ScopeName] = Field(default=["read"], min_length=1, max_length=len(SCOPES))
    requests_per_minute: Limit | None = None
    max_concurrent: Limit | None = None
    filter: MetadataFilter | None = Field(
        default=None,
        description="Passages that the key may read, by their metadata; no request widens it. Such a key has the "
        "scope 'read' alone.",
    )


class KeyObject(BaseModel):
    """A key, without its secret."""

    id: str
    tenant: str
    name: str
    scopes: list[str]
    requests_per_minute: int | None
    max_concurrent: int | None
    created_at: int
    revoked_at: int | None
    filter: dict[str, Any] | None


class CreatedKey(KeyObject):
    """A new key with its secret, which is shown this once."""

    key: str


class KeyList(BaseModel):
    """All keys, revoked ones included."""

    keys: list[KeyObject]


@keys.get("/admin/keys", responses=OPENAI.responses(401, 403, 429, 500))
async def list_keys(service: ServiceState) -> KeyList:
    """List the keys of all tenants, in the order of creation."""
    table = await _changed(service.keys.read)
    return KeyList(keys=[KeyObject(**key.to_dict()) for key in table.keys.values()])


async def _changed(change: Callable[[], T]) -> T:
    try:
        return await anyio.to_thread.run_sync(change)
    except KeyFileError as error:
        raise RequestError(str(error), code="not_stored") from error


@keys.post("/admin/keys", status_code=201, responses=OPENAI.responses(400, 401, 403, 413, 422, 429, 500))
async def create_key(body: NewKey, service: ServiceState) -> CreatedKey:
    """Create a key. The response has it in ``key``; it is shown this once and kept nowhere."""
    make = partial(
        service.keys.create,
        body.tenant,
        name=body.name,
        scopes=body.scopes,
        requests_per_minute=body.requests_per_minute,
        max_concurrent=body.max_concurrent,
        filter=body.filter,
    )
    created, key = await _changed(make)
    return CreatedKey(**created.to_dict(), key=key)


@keys.delete("/admin/keys/{key_id}", responses=OPENAI.responses(401, 403, 404, 422, 429, 500))
async def revoke_key(key_id: str, service: ServiceState) -> KeyObject:
    """Revoke a key. Its next request is refused; running ones end."""
    try:
        key = await _changed(partial(service.keys.revoke, key_id))
    except UnknownNameError as error:
        raise RequestError(str(error), param="key_id", code="not_found") from error
    return KeyObject(**key.to_dict())
