"""Settings of a process, the only reader of environment variables (prefix ``RAG_POSFIX_``); import reads nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["CacheSettings", "ServiceSettings", "Settings", "TorchrunSettings", "default_cache_dir", "environment_with"]


def default_cache_dir() -> Path:
    """Return the folder for converted weights and cached answers: ``~/.cache/rag_posfix``."""
    return Path.home() / ".cache" / "rag_posfix"


def environment_with(**changes: str) -> dict[str, str]:
    """Return the environment of this process with ``changes``, for a process that is started."""
    return {**os.environ, **changes}


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


class Settings(BaseSettings):
    """What one process runs with.

    Attributes:
        model: ``smollm2`` or ``gemma3-270m`` (packaged models), a model id, or a folder.
        embedding_model: ``minilm`` (the packaged embeddings), a model id, or a folder.
        dtype: ``auto`` picks bfloat16 where it is fast, float32 elsewhere.
        device: ``auto``, ``cpu``, ``cuda``, ...
        tp: Processes, each with a GPU if there are any, that ``ask`` and ``serve`` split the model over.
        index: Folder of a served index, or None.
        mitigation: Used where a request names none.
        order: Used where a request names none.
        k: Passages per question where a request names none.
        cache_dir: Converted weights and the disk tier of the answer cache.
        max_tokens: New tokens per answer where a request names none.
        tenant: Salt of every cache key.
        cache: The answer cache.
    """

    model_config = SettingsConfigDict(env_prefix="RAG_POSFIX_", frozen=True, extra="forbid")

    model: str = "smollm2"
    embedding_model: str = "minilm"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: str = "auto"
    tp: int = Field(default=1, ge=1)
    index: Path | None = None
    mitigation: str = "context_experts"
    order: str = "relevance"
    k: int = Field(default=10, ge=1)
    max_tokens: int = Field(default=128, ge=1)
    cache_dir: Path = Field(default_factory=default_cache_dir)
    tenant: str = ""
    cache: CacheSettings = Field(default_factory=CacheSettings)


class ServiceSettings(BaseSettings):
    """The HTTP service.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        max_concurrent: Answers that the model works on at the same time.
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
    max_concurrent: int = Field(default=1, ge=1)
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
