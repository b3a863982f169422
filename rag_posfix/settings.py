"""Settings of a process: the only code that reads environment variables (prefix ``RAG_POSFIX_``), never on import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from rag_posfix.folders import PASSAGES_FOLDER, default_cache_dir, default_data_dir

__all__ = ["Settings"]

SPINS_OF_A_WAITING_THREAD = "10000"


def environment_with(**changes: str) -> dict[str, str]:
    """Return the environment of this process with ``changes``, for a process that is started."""
    return {**os.environ, **changes}


def limit_openmp_spinning() -> None:
    """Limit the spinning of OpenMP threads that wait for each other. Must be called before torch is imported.

    The default of OpenMP spins so long that another busy program on the same cores makes the model many times slower.
    The function does nothing if ``GOMP_SPINCOUNT`` or ``OMP_WAIT_POLICY`` is set in the environment.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS_OF_A_WAITING_THREAD)


class CacheSettings(BaseSettings):
    """Settings of the answer cache, ``RAG_POSFIX_CACHE_...``.

    Attributes:
        enabled: Whether answers are cached.
        memory_entries: Maximum number of entries of the memory tier.
        disk_bytes: Size limit of the disk tier in bytes, at least 131072; 0 turns it off.
        redis_url: ``redis://``, ``rediss://``, ``unix://``, ``redis-cluster://`` or ``redis-sentinel://``; None turns
            the Redis tier off.
        redis_timeout_seconds: Time limit of one Redis operation, including the connection, while Redis is fast. It
            grows with the measured latency, up to ten times.
        ttl_seconds: Lifetime of a cached answer.
        max_entry_bytes: Size limit of a cached answer; larger answers are not cached.
    """

    model_config = SettingsConfigDict(env_prefix="RAG_POSFIX_CACHE_", frozen=True, extra="forbid")

    enabled: bool = True
    memory_entries: int = Field(default=1024, ge=0)
    disk_bytes: int = Field(default=256 * 1024**2, ge=0)
    redis_url: SecretStr | None = None
    redis_timeout_seconds: float = Field(default=0.02, gt=0, le=5)
    ttl_seconds: float = Field(default=24 * 3600.0, gt=0)
    max_entry_bytes: int = Field(default=1024**2, ge=1)


_PRECOMPUTED_BYTES = 4 * 1024**3


class PassageStoreSettings(BaseSettings):
    """Settings of the passage KV store, the cache of keys and values of passages, ``RAG_POSFIX_PASSAGES_...``.

    The disk tier is off by default, because a passage takes megabytes (3.5 MB for 150 tokens of SmolLM2-135M) and its
    content is private. ``rag-posfix index --precompute`` turns the disk tier on.

    Attributes:
        enabled: Whether keys and values are cached.
        memory_bytes: Size limit of the memory tier, on the device of the model, at least 4096; 0 turns it off.
        disk_bytes: Size limit of the disk tier, at least 65536; 0 turns it off; None is 4 GiB if passages were
            precomputed into ``cache_dir``, else off.
        redis_url: URL as for the answer cache; None turns the Redis tier off.
        redis_timeout_seconds: Time limit of one lookup in Redis, for any number of passages.
        redis_bytes: Size limit of all passages in Redis.
        redis_ttl_seconds: Lifetime of a passage in Redis.
        compress: Whether entries in Redis are compressed. Compressed entries are about a fifth smaller and slower to
            read, which suits slow networks and small servers.
    """

    model_config = SettingsConfigDict(env_prefix="RAG_POSFIX_PASSAGES_", frozen=True, extra="forbid")

    enabled: bool = True
    memory_bytes: int = Field(default=1024**3, ge=0)
    disk_bytes: int | None = Field(default=None, ge=0)
    redis_url: SecretStr | None = None
    redis_timeout_seconds: float = Field(default=0.25, gt=0, le=30)
    redis_bytes: int = Field(default=4 * 1024**3, ge=64 * 1024)
    redis_ttl_seconds: float = Field(default=7 * 24 * 3600.0, ge=1)
    compress: bool = False

    def disk_bytes_in(self, cache_dir: Path) -> int:
        """Return the size limit of the disk tier in ``cache_dir``, 0 if there is no disk tier."""
        if self.disk_bytes is not None:
            return self.disk_bytes
        return _PRECOMPUTED_BYTES if (cache_dir / PASSAGES_FOLDER).is_dir() else 0

    def is_persistent(self, cache_dir: Path) -> bool:
        """Return whether the store has a tier that other processes can read: disk or Redis."""
        return self.enabled and (self.disk_bytes_in(cache_dir) > 0 or self.redis_url is not None)


class TelemetrySettings(BaseSettings):
    """Settings of traces and metrics for OpenTelemetry, ``RAG_POSFIX_TELEMETRY_...``.

    Where they are sent, how they are sampled and the name of the service are OpenTelemetry's own variables
    (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_TRACES_SAMPLER``, ``OTEL_SERVICE_NAME``, ...).

    Attributes:
        enabled: Whether traces and metrics are sent; None sends them if ``OTEL_EXPORTER_OTLP_ENDPOINT``, or that of a
            signal, is set.
        content: Whether questions, answers and ids of documents are recorded in spans.
    """

    model_config = SettingsConfigDict(env_prefix="RAG_POSFIX_TELEMETRY_", frozen=True, extra="forbid")

    enabled: bool | None = None
    content: bool = False


class RemoteSettings(BaseSettings):
    """Settings of a remote generator (``model=openai:NAME@URL``), ``RAG_POSFIX_REMOTE_...``.

    Attributes:
        api_key: Key that is sent to that server as ``Authorization: Bearer``; None sends none. Other variables, such
            as ``OPENAI_API_KEY``, are not read.
        context_window: Token limit of prompt and answer together, as the server is configured. Tokens of prompts are
            estimated.
        connect_timeout_seconds: Time limit for opening a connection.
        timeout_seconds: How long the server may be silent: before the first token, and between pieces of an answer.
        retries: Further attempts after status 429 or 503 or a failed connection.
        max_tokens_field: The field of the request that bounds the answer; OpenAI's newer models take
            ``max_completion_tokens`` alone.
    """

    model_config = SettingsConfigDict(env_prefix="RAG_POSFIX_REMOTE_", frozen=True, extra="forbid")

    api_key: SecretStr | None = Field(default=None, min_length=1)
    context_window: int = Field(default=8192, ge=1)
    connect_timeout_seconds: float = Field(default=10.0, gt=0)
    timeout_seconds: float = Field(default=120.0, gt=0)
    retries: int = Field(default=2, ge=0, le=10)
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"


class Settings(BaseSettings):
    """Settings of a process, ``RAG_POSFIX_...``.

    Attributes:
        model: ``smollm2`` or ``gemma3-270m`` (packaged models), a model id, a folder, or ``openai:NAME@URL`` for a
            model of an OpenAI-compatible server.
        adapter: Folder of a LoRA adapter that is merged into the weights of ``model``; None for none.
        embedding_model: ``minilm`` (packaged), a model id, or a folder.
        dtype: ``auto`` chooses bfloat16 on devices that are fast with it, else float32.
        device: ``auto``, ``cpu``, ``cuda``, ...
        device_map: How transformers distributes layers over several devices, in place of ``device``; None uses one.
        batch_invariant: Whether decode passes are padded so that an answer has the same bits alone and among others:
            ``on``, ``off``, or ``auto`` for bfloat16 and float16 on CPUs.
        tp: Number of processes for tensor parallelism in ``ask`` and ``serve``, each with a GPU if there are GPUs.
        index: Folder of the served index, or None.
        indexes: Folders of further indexes by name, as JSON; requests choose one with ``posfix.index``.
        mitigation: Default method of requests.
        order: Default order of requests.
        profile: File of the order ``profile``: a record of ``rag-posfix probe slot-attention``.
        passage_tokens: Token limit of a passage, before ``passage_shrink``; None for no limit.
        passage_shrink: How much the token limit falls from the best to the worst passage, 0 to 1; needs
            ``passage_tokens``.
        overflow: What happens to a passage that exceeds its limit: ``drop``, ``truncate`` or ``error``.
        k: Default number of passages per question.
        reranker: ``name`` or ``name:parameter=value``. The reranker chooses among retrieved passages and scores
            documents of a request that have no score. None scores only the latter, by their embeddings.
        reranker_deadline_seconds: Time limit of the reranker. If it is late or fails, documents stay in their order.
        candidates: Number of passages that are retrieved for the reranker, which chooses ``k`` of them.
        retriever: ``dense`` (by embeddings), ``bm25`` (by words), or ``hybrid`` (both, their rankings fused).
        cache_dir: Folder of converted weights and of the disk tiers of the answer cache and the passage KV store.
        max_tokens: Default maximum number of tokens of an answer.
        tenant: Tenant of the process. Every cache key contains it, besides the tenant of the question.
        cache: Settings of the answer cache.
        passages: Settings of the passage KV store.
        telemetry: Settings of traces and metrics.
        remote: Settings of a remote generator.
    """

    model_config = SettingsConfigDict(env_prefix="RAG_POSFIX_", frozen=True, extra="forbid")

    model: str = "smollm2"
    adapter: Path | None = None
    embedding_model: str = "minilm"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: str = "auto"
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    batch_invariant: Literal["auto", "on", "off"] = "auto"
    tp: int = Field(default=1, ge=1)
    index: Path | None = None
    indexes: dict[str, Path] = Field(default_factory=dict)
    mitigation: str = "default"
    order: str = "relevance"
    profile: Path | None = None
    passage_tokens: int | None = Field(default=None, ge=1)
    passage_shrink: float = Field(default=0.0, ge=0, le=1)
    overflow: Literal["drop", "truncate", "error"] = "drop"
    k: int = Field(default=10, ge=1)
    reranker: str | None = Field(default=None, min_length=1)
    reranker_deadline_seconds: float = Field(default=30.0, gt=0)
    candidates: int = Field(default=20, ge=1)
    retriever: Literal["dense", "bm25", "hybrid"] = "dense"
    max_tokens: int = Field(default=128, ge=1)
    cache_dir: Path = Field(default_factory=default_cache_dir)
    tenant: str = ""
    cache: CacheSettings = Field(default_factory=CacheSettings)
    passages: PassageStoreSettings = Field(default_factory=PassageStoreSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    remote: RemoteSettings = Field(default_factory=RemoteSettings)


class ServiceSettings(BaseSettings):
    """Settings of the HTTP service, ``RAG_POSFIX_SERVICE_...``.

    Attributes:
        served_model_name: Name of the model in responses; requests may use it or the model's own. None is the last
            name of a folder, and the id of any other model.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        max_concurrent: Maximum number of requests that share the decode steps of the model. Each takes memory for its
            prompt.
        max_queue: Maximum number of waiting requests; further ones that need the model are refused with 429.
        max_open: Maximum number of open requests, those with cached answers included; further ones are refused with
            429.
        max_tokens_in_flight: Maximum number of tokens, of prompts and longest answers, of the requests that share the
            decode steps; further ones wait. A request with more is refused with 400. None is 8192 for each of
            ``max_concurrent``, or the context window of the model if that is more.
        max_queued_tokens: Maximum number of such tokens that wait for the model; further requests are refused with
            429.
        queue_timeout_seconds: How long a request may wait for the model before it is refused with 429.
        request_timeout_seconds: How long a request may take in total before it is stopped with 504.
        shutdown_timeout_seconds: How long running requests may continue after a signal to stop.
        api_key: A single key with all scopes, as ``Authorization: Bearer`` or ``x-api-key``. Without it, the keys of
            ``rag-posfix keys`` are asked for; without any key the service listens on loopback only.
        tls_cert: File of the certificate for TLS, with those of its issuers, in PEM format; None serves without TLS.
        tls_key: File of its private key, in PEM format and without a passphrase.
        shutdown_notice_seconds: How long the service answers with 503 after a signal to stop, even if no request is
            running: time for load balancers to notice.
        max_header_bytes: Size limit of request line and headers together; larger ones are refused with 431.
        read_timeout_seconds: How long a client may take to send a request, its body included, before 408.
        max_body_bytes: Size limit of a request body; larger requests are refused with 413.
        max_documents: Maximum number of documents in a request.
        log_format: ``json`` logs one JSON object for each line, ``text`` a line for people.
        data_dir: Folder of the API keys and of the collections of all tenants, on a local disk.
        max_collections: Maximum number of collections of a tenant.
        max_collection_documents: Maximum number of documents in a collection.
    """

    model_config = SettingsConfigDict(env_prefix="RAG_POSFIX_SERVICE_", frozen=True, extra="forbid")

    served_model_name: str | None = Field(default=None, min_length=1, max_length=256)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_concurrent: int = Field(default=8, ge=1)
    max_queue: int = Field(default=32, ge=0)
    max_open: int = Field(default=1024, ge=1)
    max_tokens_in_flight: int | None = Field(default=None, ge=1)
    max_queued_tokens: int = Field(default=262_144, ge=1)
    queue_timeout_seconds: float = Field(default=60.0, gt=0)
    request_timeout_seconds: float = Field(default=300.0, gt=0)
    shutdown_timeout_seconds: int = Field(default=30, ge=0)
    shutdown_notice_seconds: float = Field(default=0.0, ge=0)
    max_header_bytes: int = Field(default=32 * 1024, ge=1024)
    read_timeout_seconds: float = Field(default=60.0, gt=0)
    api_key: SecretStr | None = Field(default=None, min_length=1)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_body_bytes: int = Field(default=8 * 1024**2, ge=1)
    max_documents: int = Field(default=1000, ge=1)
    log_format: Literal["json", "text"] = "json"
    data_dir: Path = Field(default_factory=default_data_dir)
    max_collections: int = Field(default=100, ge=1)
    max_collection_documents: int = Field(default=100_000, ge=1)


class TorchrunSettings(BaseSettings):
    """Environment variables of a process that torchrun started, ``RANK`` and ``WORLD_SIZE``, without prefix.

    Attributes:
        rank: Rank of this process, from 0; None if torchrun did not start it.
        world_size: Number of processes on all machines.
    """

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    rank: int | None = None
    world_size: int | None = None


class OpenTelemetrySettings(BaseSettings):
    """The variables of OpenTelemetry that decide whether it is used, without prefix. It reads the others itself.

    Attributes:
        otel_sdk_disabled: Whether OpenTelemetry is off in this process.
        otel_exporter_otlp_endpoint: Where traces and metrics are sent.
        otel_exporter_otlp_traces_endpoint: Where traces are sent.
        otel_exporter_otlp_metrics_endpoint: Where metrics are sent.
        otel_exporter_otlp_protocol: How they are sent.
        otel_traces_exporter: How traces are sent, or ``none``.
        otel_metrics_exporter: How metrics are sent, or ``none``.
    """

    # Its specification: an empty variable is one that is not set.
    model_config = SettingsConfigDict(frozen=True, extra="ignore", env_ignore_empty=True)

    otel_sdk_disabled: str = "false"
    otel_exporter_otlp_endpoint: str | None = None
    otel_exporter_otlp_traces_endpoint: str | None = None
    otel_exporter_otlp_metrics_endpoint: str | None = None
    otel_exporter_otlp_protocol: str = "http/protobuf"
    otel_traces_exporter: str = "otlp"
    otel_metrics_exporter: str = "otlp"

    @property
    def disabled(self) -> bool:
        """Whether OpenTelemetry is off: any value but ``true`` means no."""
        return self.otel_sdk_disabled.strip().lower() == "true"

    @property
    def has_endpoint(self) -> bool:
        """Whether a variable names an endpoint."""
        return any(
            (
                self.otel_exporter_otlp_endpoint,
                self.otel_exporter_otlp_traces_endpoint,
                self.otel_exporter_otlp_metrics_endpoint,
            )
        )
