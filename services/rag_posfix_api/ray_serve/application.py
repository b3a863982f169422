"""The Ray Serve application: the HTTP service as ingress, and replicas of the model behind it.

    serve run rag_posfix_api.ray_serve.application:application allow_anonymous=true

``deployments/ray/serve.yaml`` is a configuration for ``serve run`` and ``serve deploy``. The ingress has everything
but the weights: routes, keys, limits, retrieval, embeddings, assembly and the answer cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Sampling
from rag_posfix.errors import ConfigError, GenerationError, missing_extra
from rag_posfix.generation.remote.connection import is_remote
from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix_api.ray_serve.routing import (
    MAX_MARKS,
    QUEUE_WEIGHT,
    GeneratorReplica,
    ReplicaModel,
    ReplicatedGenerator,
)
from rag_posfix_api.server import needs_key

if TYPE_CHECKING:
    from fastapi import FastAPI

MODEL_DEPLOYMENT = "Model"
"""Name of the deployment with the replicas of the model."""
INGRESS_DEPLOYMENT = "Ingress"
_OVERLAP_ROUTER = "rag_posfix_api.ray_serve.cluster.OverlapRouter"


class ApplicationOptions(BaseModel):
    """How the service is laid out on a cluster. What it serves is in the settings, which replicas read as usual.

    Attributes:
        settings: Settings that are not those of the replica's environment, by name, such as ``{"model": ...}``.
            Secrets belong into the environment: Ray keeps arguments in its log of deployments.
        service: Settings of the service in the same way, such as ``{"max_concurrent": 4}``, which is for one replica
            of the model.
        min_replicas: Fewest replicas of the model.
        max_replicas: Most replicas of the model.
        target_ongoing_requests: Requests for each replica that autoscaling aims at.
        upscale_delay_seconds: How long more replicas must be wanted before one is started.
        downscale_delay_seconds: How long fewer must be wanted before one is stopped. A stopped one loses its passages.
        graceful_shutdown_seconds: How long a replica that is stopped may finish answers. None: the service's limit of
            a request, and 10 s.
        replica_cpus: CPUs that Ray reserves for a replica of the model.
        replica_gpus: GPUs that it reserves.
        ingress_replicas: Replicas of the HTTP service. Each has its own answer cache in memory, and without Redis its
            own quotas.
        ingress_cpus: CPUs that Ray reserves for one of them.
        router: ``overlap``, ``power_of_two``, or the path of a ``RequestRouter``.
        router_options: What its ``initialize_state`` takes; for ``overlap`` besides ``queue_weight``.
        queue_weight: Share of a question's passages that outweighs one request in the queue, for ``overlap``.
        sketch_seconds: Seconds between two sketches of a replica.
        sketch_passages: Bound of a sketch.
        attempts: How often a request is sent, if replicas are lost while they answer.
        allow_anonymous: Whether the service may run without an API key. Ray decides which addresses reach it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    settings: dict[str, Any] = Field(default_factory=dict)
    service: dict[str, Any] = Field(default_factory=dict)
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=2, ge=1)
    target_ongoing_requests: float = Field(default=4.0, gt=0)
    upscale_delay_seconds: float = Field(default=30.0, ge=0)
    downscale_delay_seconds: float = Field(default=600.0, ge=0)
    graceful_shutdown_seconds: float | None = Field(default=None, ge=0)
    replica_cpus: float = Field(default=1.0, ge=0)
    replica_gpus: float = Field(default=0.0, ge=0)
    ingress_replicas: int = Field(default=1, ge=1)
    ingress_cpus: float = Field(default=0.5, ge=0)
    router: str = "overlap"
    router_options: dict[str, Any] = Field(default_factory=dict)
    queue_weight: float = Field(default=QUEUE_WEIGHT, ge=0)
    sketch_seconds: float = Field(default=1.0, gt=0)
    sketch_passages: int = Field(default=MAX_MARKS, ge=1)
    attempts: int = Field(default=4, ge=1)
    allow_anonymous: bool = False

    @model_validator(mode="after")
    def _in_order(self) -> ApplicationOptions:
        if self.min_replicas > self.max_replicas:
            raise ConfigError(f"min_replicas={self.min_replicas} must be at most max_replicas={self.max_replicas}")
        return self


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The two halves of a generator.

    Attributes:
        load: Loads the model, in a replica.
        describe: Describes it without its weights, in the ingress.
    """

    load: Callable[[Settings], ReplicaModel]
    describe: Callable[[Settings], Generator]


def application(args: Mapping[str, Any]) -> Any:
    """Return the application for ``serve run`` and ``serve deploy``.

    Args:
        args: The options by name; ``ApplicationOptions`` describes them.

    Raises:
        ConfigError: Ray Serve is not installed, an option or a setting is wrong, or there is no API key and
            ``allow_anonymous`` is off.
    """
    try:
        options = ApplicationOptions(**args)
    except ValidationError as error:
        raise _config_error("options", error) from error
    return make_application(options, ModelParts(load_model, describe_model))


def make_application(options: ApplicationOptions, model_parts: ModelParts) -> Any:
    """Return the application with the caller's model. Raises the errors of ``application``."""
    try:
        from ray import serve
    except ImportError as error:
        raise missing_extra(str(error.name), "ray,server") from error
    from rag_posfix_api.ray_serve.cluster import ReplicaGauges

    _, limits = _settings_of(options)
    if not (needs_key(limits) or options.allow_anonymous):
        raise ConfigError(
            "there is no API key, and others may reach Ray's HTTP proxy; create one with: rag-posfix keys create "
            "TENANT (or set RAG_POSFIX_SERVICE_API_KEY), or set allow_anonymous"
        )
    at_once, waiting = limits.max_concurrent, limits.max_queue
    shutdown_seconds = options.graceful_shutdown_seconds
    if shutdown_seconds is None:
        shutdown_seconds = limits.request_timeout_seconds + 10
    model = serve.deployment(
        GeneratorReplica,
        name=MODEL_DEPLOYMENT,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_ongoing_requests,
            "upscale_delay_s": options.upscale_delay_seconds,
            "downscale_delay_s": options.downscale_delay_seconds,
        },
        graceful_shutdown_timeout_s=shutdown_seconds,
        max_ongoing_requests=at_once + waiting,
        ray_actor_options={"num_cpus": options.replica_cpus, "num_gpus": options.replica_gpus},
        request_router_config=router_config(options),
    )

    def ingress() -> FastAPI:  # in the replica of the ingress: an application cannot travel
        handle = serve.get_deployment_handle(MODEL_DEPLOYMENT)
        return build_ingress(options, model_parts, handle)

    front = serve.deployment(
        serve.ingress(ingress)(),
        name=INGRESS_DEPLOYMENT,
        num_replicas=options.ingress_replicas,
        max_ongoing_requests=limits.max_open,
        graceful_shutdown_timeout_s=shutdown_seconds,
        ray_actor_options={"num_cpus": options.ingress_cpus},
    )
    load = partial(_load, options, model_parts)
    return front.bind(model.bind(load, at_once, waiting, options.sketch_passages, ReplicaGauges()))


def build_ingress(options: ApplicationOptions, model_parts: ModelParts, handle: Any) -> FastAPI:
    """Return the HTTP service whose answers come from the replicas behind ``handle``.

    Its limits are the limits of one replica times ``max_replicas``: the replicas can take every admitted request.
    """
    from rag_posfix.pipeline.build import build_pipeline  # torch and transformers: in the replica alone
    from rag_posfix_api.app import create_app
    from rag_posfix_api.ray_serve.cluster import ServeReplicas

    settings, limits = _settings_of(options)
    generator = ReplicatedGenerator(model_parts.describe(settings), ServeReplicas(handle), options.attempts)
    limits = limits.model_copy(
        update={
            "max_concurrent": limits.max_concurrent * options.max_replicas,
            "max_queue": limits.max_queue * options.max_replicas,
            "allow_anonymous": limits.allow_anonymous or options.allow_anonymous,
        }
    )
    return create_app(settings, build_pipeline(settings, generator=generator, follows_index=True), limits)


def _settings_of(options: ApplicationOptions) -> tuple[Settings, ServiceSettings]:
    """Return the settings of this process's environment, overridden by the options."""
    try:
        return Settings(**options.settings), ServiceSettings(**options.service)
    except ValidationError as error:
        raise _config_error("settings", error) from error


def _config_error(subject: str, error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    return ConfigError(f"{subject} of the application: {name + ': ' if name else ''}{first['msg']}")


def router_config(options: ApplicationOptions) -> dict[str, Any]:
    """Return Ray's ``RequestRouterConfig`` of the replicas of the model, as plain data."""
    chosen: dict[str, Any] = {}
    if options.router == "overlap":
        kwargs = {"queue_weight": options.queue_weight, **options.router_options}
        chosen = {"request_router_class": _OVERLAP_ROUTER, "request_router_kwargs": kwargs}
    elif options.router != "power_of_two":  # which is Ray's default
        chosen = {"request_router_class": options.router, "request_router_kwargs": options.router_options}
    return {
        **chosen,
        "request_routing_stats_period_s": options.sketch_seconds,
        "request_routing_stats_timeout_s": max(30.0, options.sketch_seconds),
    }


def _load(options: ApplicationOptions, model_parts: ModelParts) -> ReplicaModel:
    return model_parts.load(_settings_of(options)[0])


def load_model(settings: Settings) -> ReplicaModel:
    """Return the model of ``settings`` with its passage KV store, after one answer; the ingress has all else."""
    from rag_posfix.pipeline.build import build_pipeline

    without_retrieval: dict[str, Any] = {
        "index": None,
        "indexes": {},
        "reranker": None,
        "retriever": "dense",
        "cache": settings.cache.model_copy(update={"enabled": False}),
    }
    pipeline = build_pipeline(settings.model_copy(update=without_retrieval))
    passage = Document(page_content="The replica is warm.", metadata={"relevance_score": 1.0})
    sampling = Sampling(max_tokens=2)
    pipeline.ask(Question("Is the replica warm?", documents=[passage], sampling=sampling, allow_unsupported=True))
    return ReplicaModel(pipeline.generator, pipeline.passages)


def describe_model(settings: Settings) -> Generator:
    """Return the description of the model of ``settings``, without its weights.

    Raises:
        ConfigError: the model is on a server, cannot be found, or cannot be read.
    """
    from rag_posfix.generation.deferred import deferred_generator

    if is_remote(settings.model):
        raise ConfigError(
            f"model={settings.model!r} is on a server, and replicas would only pass requests on; serve it with: "
            "rag-posfix serve"
        )
    return deferred_generator(
        settings.model,
        _no_weights,
        dtype=settings.dtype,
        device=settings.device,
        cache_dir=settings.cache_dir,
        adapter=settings.adapter,
    )


def _no_weights() -> Generator:
    raise GenerationError("the ingress has no weights; its answers come from replicas")
