"""Options of the Ray Serve application: the ``args`` of its configuration file. No Ray is imported."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rag_posfix.errors import ConfigError
from rag_posfix_api.ray_serve.scoring import QUEUE_WEIGHT
from rag_posfix_api.ray_serve.sketch import MOST_MARKS


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
        replica_cpus: CPUs that Ray reserves for a replica of the model.
        replica_gpus: GPUs that it reserves.
        ingress_replicas: Replicas of the HTTP service. Each has its own quotas and its own answer cache in memory.
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
    replica_cpus: float = Field(default=1.0, ge=0)
    replica_gpus: float = Field(default=0.0, ge=0)
    ingress_replicas: int = Field(default=1, ge=1)
    ingress_cpus: float = Field(default=0.5, ge=0)
    router: str = "overlap"
    router_options: dict[str, Any] = Field(default_factory=dict)
    queue_weight: float = Field(default=QUEUE_WEIGHT, ge=0)
    sketch_seconds: float = Field(default=1.0, gt=0)
    sketch_passages: int = Field(default=MOST_MARKS, ge=1)
    attempts: int = Field(default=4, ge=1)
    allow_anonymous: bool = False

    @model_validator(mode="after")
    def _in_order(self) -> ApplicationOptions:
        if self.min_replicas > self.max_replicas:
            raise ConfigError(f"min_replicas={self.min_replicas} must be at most max_replicas={self.max_replicas}")
        return self
