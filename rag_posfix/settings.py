"""Settings of a process, the only reader of environment variables (prefix ``RAG_POSFIX_``); import reads nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from rag_posfix.folders import PASSAGES_FOLDER, default_cache_dir

__all__ = [
    "CacheSettings",
    "PassageStoreSettings",
    "ServiceSettings",
    "Settings",
    "TorchrunSettings",
    "environment_with",
    "wait_politely",
]

SPINS_OF_A_WAITING_THREAD = "10000"


def environment_with(**changes: str) -> dict[str, str]:
    """Return the environment of this process with ``changes``, for a process that is started."""
    return {**os.environ, **changes}


def wait_politely() -> None:
    """Let threads of OpenMP spin only shortly while they wait for each other; for a program, before it imports torch.

    By default they spin so long that another busy program on the same cores slows the model down many times over.
    ``GOMP_SPINCOUNT`` and ``OMP_WAIT_POLICY`` of the environment are left as they are where one is set.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS_OF_A_WAITING_THREAD)


class CacheSettings(BaseSettings):
    """The answer cache.

    Attributes:
        enabled: Whether answers are cached at all.
        memory_entries: Entries kept in memory.
        disk_bytes: Size bound of the disk tier, at least 131072; 0 turns it off.
        redis_url: ``redis://``, ``rediss://``, ``unix://``, ``redis-cluster://`` or ``redis-sentinel://``; None turns
            the shared tier off.
        redis_timeout_seconds: Bound of one Redis operation, connecting included.
        ttl_seconds: How long an answer is kept.
        max_entry_bytes: Larger answers are not cached.
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
    """The passage store: keys and values of passages that methods with independent passages read once.

    The disk tier is off until somebody asks for it: a passage takes megabytes (3.5 MB for 150 tokens of SmolLM2-135M),
    to write them after every question wears a disk that nobody offered, and what is kept is as private as they are.
    It pays where an index is served that was read beforehand: ``rag-posfix index --precompute`` turns it on.

    Attributes:
        enabled: Whether passages are kept at all.
        memory_bytes: Size bound of the memory tier, on the device of the model, at least 4096; 0 turns it off.
        disk_bytes: Size bound of the disk tier, at least 65536; 0 turns it off; None is 4 GiB where passages were
            precomputed, else off.
        redis_url: As that of the answer cache; None turns the shared tier off.
        redis_timeout_seconds: Bound of one search in Redis, however many passages it asks for.
        redis_bytes: Size bound of all passages in Redis.
        redis_ttl_seconds: How long a passage is kept in Redis.
        compress: Whether passages are sent to Redis compressed: about a fifth smaller, and slower to read; for slow
            networks and small servers.
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
        """Return the size bound of the disk tier in ``cache_dir``, 0 where there is none."""
        if self.disk_bytes is not None:
            return self.disk_bytes
        return _PRECOMPUTED_BYTES if (cache_dir / PASSAGES_FOLDER).is_dir() else 0

    def outlives_the_process(self, cache_dir: Path) -> bool:
        """Return whether passages are kept where another process finds them."""
        return self.enabled and (self.disk_bytes_in(cache_dir) > 0 or self.redis_url is not None)


class Settings(BaseSettings):
    """What one process runs with.

    Attributes:
        model: ``smollm2`` or ``gemma3-270m`` (packaged models), a model id, or a folder.
        embedding_model: ``minilm`` (the packaged embeddings), a model id, or a folder.
        dtype: ``auto`` picks bfloat16 where it is fast, float32 elsewhere.
        device: ``auto``, ``cpu``, ``cuda``, ...
        device_map: How transformers deals a model out to several devices, in place of ``device``; None uses one.
        tp: Processes, each with a GPU if there are any, that ``ask`` and ``serve`` split the model over.
        index: Folder of a served index, or None.
        mitigation: Used where a request names none.
        order: Used where a request names none.
        profile: File of the order ``profile``: a record of ``rag-posfix probe slot-attention``.
        passage_tokens: Tokens that a passage may take on average, or None for no limit.
        passage_shrink: How much less passages of late ranks may take, 0 to 1; needs ``passage_tokens``.
        overflow: What happens to a passage that is longer: ``drop``, ``truncate`` or ``error``.
        k: Passages per question where a request names none.
        reranker: ``name`` or ``name:parameter=value`` of what chooses among retrieved passages and scores documents
            that come without a score; None scores the latter alone, by their embeddings.
        reranker_deadline_seconds: After so long, or if it fails, documents keep their order.
        candidates: Passages that are retrieved for a named reranker to choose ``k`` from.
        retriever: How passages are found: ``dense`` by embeddings, ``bm25`` by words, ``hybrid`` by both, their
            rankings fused.
        cache_dir: Converted weights and the disk tiers of the answer cache and the passage store.
        max_tokens: New tokens per answer where a request names none.
        tenant: Salt of every cache key.
        cache: The answer cache.
        passages: The passage store.
    """

    model_config = SettingsConfigDict(env_prefix="RAG_POSFIX_", frozen=True, extra="forbid")

    model: str = "smollm2"
    embedding_model: str = "minilm"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: str = "auto"
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    tp: int = Field(default=1, ge=1)
    index: Path | None = None
    mitigation: str = "context_experts"
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


class ServiceSettings(BaseSettings):
    """The HTTP service.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        max_concurrent: Answers that the model works on at the same time; their decode steps run together. Each takes
            memory for its prompt.
        max_queue: Requests that may wait behind them; more are refused with 429.
        queue_timeout_seconds: How long a request waits for the model before it is refused with 429.
        request_timeout_seconds: How long one answer may take before it is stopped with 504.
        shutdown_timeout_seconds: How long open answers may run on after a signal to stop.
        api_key: Every request must bring it as ``Authorization: Bearer``; None lets everybody in.
        max_body_bytes: Larger requests are refused with 413.
        max_documents: Most documents that one request may bring.
    """

    model_config = SettingsConfigDict(env_prefix="RAG_POSFIX_SERVICE_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_concurrent: int = Field(default=8, ge=1)
    max_queue: int = Field(default=32, ge=0)
    queue_timeout_seconds: float = Field(default=60.0, gt=0)
    request_timeout_seconds: float = Field(default=300.0, gt=0)
    shutdown_timeout_seconds: int = Field(default=30, ge=0)
    api_key: SecretStr | None = Field(default=None, min_length=1)
    max_body_bytes: int = Field(default=8 * 1024**2, ge=1)
    max_documents: int = Field(default=1000, ge=1)


class TorchrunSettings(BaseSettings):
    """What torchrun tells each of the processes that it starts; these variables have no prefix.

    Attributes:
        rank: Which of the processes this one is, from 0; None where torchrun has not started it.
        world_size: How many there are on all machines.
    """

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    rank: int | None = None
    world_size: int | None = None
