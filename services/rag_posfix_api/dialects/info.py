"""What is served: GET /info. No secret, no path, and nothing of a tenant."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import anyio.to_thread
from fastapi import APIRouter
from pydantic import BaseModel

from rag_posfix_api.dialects.errors import OPENAI
from rag_posfix_api.http.body_shape import MAX_DEPTH, MAX_VALUES
from rag_posfix_api.runtime.service import ReadyService, Service, package_version

_PACKAGES = ("torch", "transformers", "langchain-core", "fastapi", "faiss-cpu", "sentence-transformers")

router = APIRouter(tags=["info"])


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


@router.get("/info", operation_id="info", response_model=Info, responses=OPENAI.responses(401, 403, 429, 500, 503))
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
    found = {"rag-posfix": package_version(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
