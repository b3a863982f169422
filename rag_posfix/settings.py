"""Settings of a process, from arguments, environment and configuration file, in this order; never read on import.

The only code that reads environment variables (prefix ``RAG_POSFIX_``).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from rag_posfix.checked import Checked, checked_min_relevance, checked_retriever, may_hold_secret
from rag_posfix.checkpoints import choose_reader
from rag_posfix.errors import ConfigError
from rag_posfix.files import (
    ANSWERS_FOLDER,
    CONFIG_FILE,
    PASSAGES_FOLDER,
    default_cache_dir,
    default_data_dir,
    nearest_name,
    read_config_file,
)
from rag_posfix.parameters import shown
from rag_posfix.process import checked_device
from rag_posfix.registry import check_method, import_modules
from rag_posfix.text import NO_PASSAGE_TEXT

__all__ = ["Settings"]


_PREFIX = "RAG_POSFIX_"
_CONFIG_VARIABLE = "RAG_POSFIX_CONFIG"
_PLUGINS_VARIABLE = "RAG_POSFIX_PLUGINS"
_OTHER_VARIABLES = frozenset(
    {_CONFIG_VARIABLE, _PLUGINS_VARIABLE, "RAG_POSFIX_KEY", "RAG_POSFIX_TAG", "RAG_POSFIX_TARGET"}
)
"""The file, plug-ins, the key in programs that the page shows, and what the Compose files choose images by."""
_KUBERNETES_VARIABLE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$")
"""What Kubernetes sets in each container for a Service whose name begins with rag-posfix."""
AUTO_MODEL = "auto"


class CheckedSettings(Checked, BaseSettings, hide_input_in_errors=True):
    """Base of all settings: an error names the argument, variable or key of a file, and hides secrets."""

    if not TYPE_CHECKING:  # type checkers see the fields

        def __init__(self, **values: Any) -> None:
            if self.group() is not None:
                _check_variables()
                _import_plugins()
            try:
                super().__init__(**values)
            except SettingsError as error:  # its message names the field
                name = (re.search(r'field "(\w+)"', str(error)) or ("", "..."))[1]
                value = shown(os.environ.get(f"{self.model_config['env_prefix']}{name}".upper()))
                raise ConfigError(f"{self.describe_value({})((name,), value)} must be JSON: {error}") from error

        __init__.__pydantic_base_init__ = True

    @classmethod
    def group(cls) -> str | None:
        """Return the table of a configuration file with these settings: "" is none; None if no file has them."""
        prefix = cls.model_config["env_prefix"]
        return prefix.removeprefix(_PREFIX).rstrip("_").lower() if prefix else None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return what values are read from, the first one wins."""
        return init_settings, env_settings, _FileSource(settings_cls, _in_file(cls.group()))

    @classmethod
    def describe_value(cls, values: dict[str, Any]) -> Any:
        """Name a field by the variable, or the key of a file, that it was read from, and hide secrets."""

        def describe(path: tuple[int | str, ...], value: str) -> str:
            field, *keys = map(str, path)
            name = variable = f"{cls.model_config['env_prefix']}{field}".upper()
            if field in values or variable not in os.environ:
                in_file = field not in values and field in _in_file(cls.group())
                key = f"{cls.group()}.{field}" if cls.group() else field
                name = f"{os.environ[_CONFIG_VARIABLE]}: {key}" if in_file else f"setting {field}"
            return ".".join([name, *keys]) + ("" if may_hold_secret(cls, path) else f"={value}")

        return describe


class _FileSource(InitSettingsSource):
    """Values of the configuration file. One from the environment replaces a table or list of the file as a whole."""

    def __call__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__call__().items() if name not in self.current_state}


class CacheSettings(CheckedSettings):
    """Settings of the answer cache, ``RAG_POSFIX_CACHE_...``.

    Attributes:
        enabled: Whether answers are cached.
        memory_entries: Maximum number of entries of the memory tier.
        disk_bytes: Size limit of the disk tier in bytes, at least 131072; 0 turns it off; None is 256 MiB with
            ``RAG_POSFIX_KEEP_ON_DISK=true``, else off.
        redis_url: ``redis://``, ``rediss://`` (TLS), ``unix://``, ``redis-cluster://``, ``rediss-cluster://``,
            ``redis-sentinel://`` or ``rediss-sentinel://``; None turns the Redis tier off.
        redis_timeout_seconds: Time limit of one Redis operation, including the connection, while Redis is fast. It
            grows with the measured latency, up to ten times.
        ttl_seconds: Lifetime of a cached answer.
        max_entry_bytes: Size limit of a cached answer; larger answers are not cached.
        backend: A further tier, of a plug-in: ``name`` or ``name:parameter=value``; None for none.
    """

    model_config = SettingsConfigDict(env_prefix="RAG_POSFIX_CACHE_", frozen=True, extra="forbid")

    enabled: bool = True
    memory_entries: int = Field(default=1024, ge=0)
    disk_bytes: int | None = Field(default=None, ge=0)
    redis_url: SecretStr | None = None
    redis_timeout_seconds: float = Field(default=0.02, gt=0, le=5)
    ttl_seconds: float = Field(default=24 * 3600.0, gt=0)
    max_entry_bytes: int = Field(default=1024**2, ge=1)
    backend: str | None = Field(default=None, min_length=1, repr=False)


_PASSAGE_DISK_BYTES = 4 * 1024**3
_DISK_TIERS = (("cache", ANSWERS_FOLDER, 256 * 1024**2), ("passages", PASSAGES_FOLDER, _PASSAGE_DISK_BYTES))


class PassageStoreSettings(CheckedSettings):
    """Settings of the passage KV store, the cache of keys and values of passages, ``RAG_POSFIX_PASSAGES_...``.

    The disk tier is off by default, because a passage takes megabytes (3.5 MB for 150 tokens of SmolLM2-135M) and its
    content is private. ``rag-posfix index --precompute`` turns the disk tier on.

    Attributes:
        enabled: Whether keys and values are cached.
        memory_bytes: Size limit of the memory tier, on the device of the model, at least 4096; 0 turns it off.
        disk_bytes: Size limit of the disk tier, at least 65536; 0 turns it off; None is 4 GiB with
            ``RAG_POSFIX_KEEP_ON_DISK=true`` or if passages were precomputed into ``cache_dir``, else off.
        redis_url: URL as for the answer cache; None turns the Redis tier off.
        redis_timeout_seconds: Time limit of one lookup in Redis, for any number of passages.
        redis_bytes: Size limit of all passages in Redis.
        redis_ttl_seconds: Lifetime of a passage in Redis.
        compress: Whether entries in Redis are compressed. Compressed entries are about a fifth smaller and slower to
            read, which suits slow networks and small servers.
        backend: A further tier, of a plug-in: ``name`` or ``name:parameter=value``; None for none.
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
    backend: str | None = Field(default=None, min_length=1, repr=False)

    def disk_bytes_in(self, cache_dir: Path) -> int:
        """Return the size limit of the disk tier in ``cache_dir``, 0 if there is no disk tier."""
        if self.disk_bytes is not None:
            return self.disk_bytes
        return _PASSAGE_DISK_BYTES if (cache_dir / PASSAGES_FOLDER).is_dir() else 0

    def is_persistent(self, cache_dir: Path) -> bool:
        """Return whether the store has a tier that other processes can read: disk or Redis."""
        return self.enabled and (self.disk_bytes_in(cache_dir) > 0 or self.redis_url is not None)


class TelemetrySettings(CheckedSettings):
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


class RemoteSettings(CheckedSettings):
    """Settings of a remote generator (``model=openai:NAME@URL``), ``RAG_POSFIX_REMOTE_...``.

    Attributes:
        api_key: Key that is sent to that server as ``Authorization: Bearer``; None sends none. Other variables, such
            as ``OPENAI_API_KEY``, are not read.
        context_window: Token limit of prompt and answer together, as the server is configured. Tokens of prompts are
            estimated.
        connect_timeout_seconds: Time limit for opening a connection.
        timeout_seconds: How long the server may be silent: before the first token, and between pieces of an answer.
        retries: Further attempts after status 429 or 503, or if no connection is made or it is closed at once.
        concurrency: Requests about single passages (``yes_no``, ``likelihood``, rows that vote) that are sent to the
            server at the same time, those of all questions together.
        max_tokens_field: The field of the request that bounds the answer; OpenAI's newer models take
            ``max_completion_tokens`` alone.
    """

    model_config = SettingsConfigDict(env_prefix="RAG_POSFIX_REMOTE_", frozen=True, extra="forbid")

    api_key: SecretStr | None = Field(default=None, min_length=1)
    context_window: int = Field(default=8192, ge=1)
    connect_timeout_seconds: float = Field(default=10.0, gt=0)
    timeout_seconds: float = Field(default=120.0, gt=0)
    retries: int = Field(default=2, ge=0, le=10)
    concurrency: int = Field(default=16, ge=1, le=1024)
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"


class Settings(CheckedSettings):
    """Settings of a process, ``RAG_POSFIX_...``.

    Attributes:
        model: ``auto``, a packaged model (``qwen2.5-coder-0.5b``, ``qwen2.5-coder-1.5b``, ``smollm2``,
            ``gemma3-270m``), a model id, a folder, a GGUF file, or ``openai:NAME@URL`` for a model of an
            OpenAI-compatible server. ``auto`` is the best packaged reader that is fetched and fits the memory, and
            ``smollm2`` where none is.
        adapter: Folder of a LoRA adapter that is merged into the weights of ``model``; None for none.
        embedding_model: ``minilm`` (packaged, English), ``multilingual``, a model id, or a folder.
        dtype: ``auto`` chooses bfloat16 on devices that are fast with it, else float32.
        device: ``auto``, ``cpu``, ``cuda``, ...
        device_map: How transformers distributes layers over several devices, in place of ``device``; None uses one.
        batch_invariant: Whether an answer has the same bits alone and among others: ``on``, ``off``, or ``auto``,
            which is ``on`` for bfloat16 and float16 on CPUs; ``blocks``: in blocks of rows where padding would do.
        tp: Number of processes for tensor parallelism in ``ask`` and ``serve``, each with a GPU if there are GPUs.
        index: Folder of the served index, or None.
        indexes: Folders of further indexes by name, as JSON; requests choose one with ``posfix.index``.
        mitigation: Default method of requests. Where neither it nor a reranker or an order is named, a model with
            1,536 channels or more reads together the three passages that it judges best.
        order: Default order of requests.
        profile: What was measured of the model: a profile of ``rag-posfix measure``, which ``mitigation=auto`` (then
            the default) uses, or the file of the order ``profile``, a record of ``rag-posfix probe slot-attention``.
        passage_tokens: Token limit of a passage, before ``passage_shrink``; None for no limit.
        passage_shrink: How much the token limit falls from the best to the worst passage, 0 to 1; needs
            ``passage_tokens``.
        overflow: What happens to a passage that exceeds its limit: ``drop``, ``truncate`` or ``error``.
        k: Default number of passages per question.
        reranker: ``name`` or ``name:parameter=value``. The reranker chooses among retrieved passages and scores
            documents of a request that have no score. None scores only the latter, by their embeddings.
        reranker_deadline_seconds: Time limit of the reranker. If it is late or fails, documents stay in their order.
        candidates: Number of passages that are retrieved for the reranker, which chooses ``k`` of them.
        retriever: ``auto`` (by embeddings, three of ten passages by words), ``dense`` (by embeddings), ``bm25`` (by
            words), or ``hybrid`` (both, their rankings fused); or a vector store of another program instead of an
            index, ``KIND:key=value,...`` (docs/retrieval.md).
        min_relevance: Which retrieved passages are read: ``auto`` (those about the question: by similarity, and where
            that does not decide by the model), ``off`` (all), or the lowest similarity, 0 to 1.
        second_step: Whether a second search may follow with names of the best passage.
        template: Prompt template: the name of a shipped one (``short``, ``full``, ``citations``, ``unknown``; with
            ``-de``, ``-fr``, ``-es``, ``-zh`` or ``-ko`` for another language), or a file in TOML or Jinja2.
        follow_language: Whether questions in these languages get the translation of a shipped English template, and
            its text for no passage.
        language_templates: Templates, named as ``template``, by the code of the question's language.
        history_first: Whether passages follow system message and history of the caller in the prompt, so that they
            are encoded anew in every turn; by default they precede both.
        query: What is searched for in a conversation: ``last`` (the last question), ``history`` (the last messages of
            the user with falling weight), or ``rewrite`` (a question that the model or ``writer`` writes).
        writer: Model that writes the queries of ``rewrite``, named as ``model``; None for the served model.
        cache_dir: Folder of converted weights and of the disk tiers of the answer cache and the passage KV store.
        keep_on_disk: Whether answers, and keys and values of passages, are also kept in ``cache_dir``, for later
            processes. None keeps passages there only if they were precomputed into it, and no answers.
        max_tokens: Default maximum number of tokens of an answer.
        allow_ungrounded: Whether the model answers from its memory if no passage was found.
        allow_unsupported: Whether the model answers if, by its own judgement or its words, no passage supports it.
        no_passage_text: The answer if no passage was found and ``allow_ungrounded`` is off, and if no passage answers
            the question and ``allow_unsupported`` is off.
        tenant: Tenant of the process. Every cache key contains it, besides the tenant of the question.
        cache: Settings of the answer cache.
        passages: Settings of the passage KV store.
        telemetry: Settings of traces and metrics.
        remote: Settings of a remote generator.
    """

    model_config = SettingsConfigDict(env_prefix="RAG_POSFIX_", frozen=True, extra="forbid")

    model: str = AUTO_MODEL
    adapter: Path | None = None
    embedding_model: str = "minilm"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: str = "auto"
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    batch_invariant: Literal["auto", "on", "blocks", "off"] = "auto"
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
    reranker_deadline_seconds: float = Field(default=120.0, gt=0)
    candidates: int = Field(default=20, ge=1)
    retriever: Annotated[str, AfterValidator(checked_retriever)] = Field(default="auto", repr=False)
    max_tokens: int = Field(default=128, ge=1)
    allow_ungrounded: bool = False
    allow_unsupported: bool = False
    no_passage_text: str = Field(default=NO_PASSAGE_TEXT, min_length=1)
    min_relevance: str = "auto"
    second_step: bool = True
    template: str = Field(default="short", min_length=1)
    follow_language: bool = True
    language_templates: dict[str, str] = Field(default_factory=dict)
    history_first: bool = False
    query: Literal["last", "history", "rewrite"] = "history"
    writer: str | None = Field(default=None, min_length=1)
    cache_dir: Path = Field(default_factory=default_cache_dir)
    keep_on_disk: bool | None = None
    tenant: str = ""
    cache: CacheSettings = Field(default_factory=CacheSettings)
    passages: PassageStoreSettings = Field(default_factory=PassageStoreSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    remote: RemoteSettings = Field(default_factory=RemoteSettings)

    @field_validator("mitigation", "order", "reranker")
    @classmethod
    def _known_method(cls, method: str | None, info: ValidationInfo) -> str | None:
        if method is not None:
            check_method(str(info.field_name), method)
        return method

    @field_validator("min_relevance", mode="before")
    @classmethod
    def _known_min_relevance(cls, min_relevance: object) -> str:
        return str(checked_min_relevance(min_relevance))

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        return checked_device(device)

    @model_validator(mode="after")
    def _choose_reader(self) -> Self:
        if self.model == AUTO_MODEL:
            object.__setattr__(self, "model", choose_reader(self.cache_dir))  # the settings are frozen
            self.model_fields_set.discard("model")
        return self

    @model_validator(mode="after")
    def _resolve_disk(self) -> Self:
        """Give the tiers on disk that ``keep_on_disk`` is about their sizes, unless they have one."""
        for name, _, size in _DISK_TIERS:
            tiers = getattr(self, name)
            if self.keep_on_disk is not None and tiers.disk_bytes is None:
                resolved = tiers.model_copy(update={"disk_bytes": size if self.keep_on_disk else 0})
                object.__setattr__(self, name, resolved)  # the settings are frozen
        return self

    def with_files(self) -> Self:
        """Return these settings with the tiers on disk whose folders exist, to count or drop what is in them."""
        changes = {
            name: getattr(self, name).model_copy(update={"disk_bytes": size})
            for name, folder, size in _DISK_TIERS
            if not getattr(self, name).disk_bytes and (self.cache_dir / folder).is_dir()
        }
        return self.model_copy(update=changes)


class ServiceSettings(CheckedSettings):
    """Settings of the HTTP service, ``RAG_POSFIX_SERVICE_...``.

    Attributes:
        served_model_name: Name of the model in responses and requests. None is the name of its folder, or its id.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        max_concurrent: Maximum number of requests that share decode steps. Each takes memory for its prompt.
        max_queue: Maximum number of waiting requests; further ones that need the model are refused with 429.
        max_open: Maximum number of open requests, with cached answers too; further ones are refused with 429.
        max_tokens_in_flight: Maximum number of tokens, of prompts and longest answers, of the requests that share the
            decode steps; further ones wait. A request with more is refused with 400. None is 8192 for each of
            ``max_concurrent``, or the context window of the model if that is more.
        max_queued_tokens: Maximum number of such tokens that wait for the model; further ones are refused with 429.
        queue_timeout_seconds: How long a request may wait for the model before it is refused with 429.
        request_timeout_seconds: How long a request may take in total before it is stopped with 504.
        shutdown_timeout_seconds: How long running requests may continue after a signal to stop.
        api_key: A single key with all scopes, as ``Authorization: Bearer`` or ``x-api-key``. Without it, the keys of
            ``rag-posfix keys`` are asked for; without any key the service listens on loopback only.
        tls_cert: File of the certificate for TLS, with those of its issuers, in PEM format; None serves without TLS.
        tls_key: File of its private key, in PEM format and without a passphrase.
        quotas_without_redis: What holds for keys with limits while Redis, where all processes count the requests of a
            key, does not answer: ``local`` lets each process count for itself, ``reject`` answers 503.
        allow_anonymous: Serve other machines, also through a proxy, without any API key; without it that is refused.
        require_key: Refuse every request without a key, also while no key exists.
        metrics_address: ``HOST:PORT`` on which ``/metrics`` is served without a key, for the network of the operator.
            With keys, ``/metrics`` of the service needs one with the scope ``metrics``: it names tenants.
        shutdown_notice_seconds: Least time of 503 after a signal to stop, for load balancers to notice.
        cors_origins: Origins of web pages that may call the service, as a JSON list: ``["https://a.example"]``.
        read_timeout_seconds: How long a client may take to send a request before 408, or read nothing of a response.
        keep_alive_seconds: How long a connection without a request stays open: longer than proxies keep theirs.
        max_body_bytes: Size limit of a request body, and of the response to a search; beyond it is 413.
        max_documents: Maximum number of documents in a request.
        ungrounded: When the model answers without a passage. ``never``; ``chat``, if the request has no documents and
            there is no index to search, so that its messages are all there is; or ``request``, also if the request
            asks for it with ``posfix.allow_ungrounded``. ``RAG_POSFIX_ALLOW_UNGROUNDED`` is for every request.
        log_format: ``json`` logs one JSON object for each line, ``text`` a line for people.
        source_text: Whether responses may have the text of passages from an index or a collection; titles, files and
            pages they always have.
        tenant_field: Metadata field that names the tenant of a passage, in an index or vector store that several
            tenants share: a caller with a tenant reads passages of that tenant alone. None shares all passages.
            Collections belong to one tenant anyway.
        data_dir: Folder of the API keys and of the collections of all tenants, on a local disk.
        collection_passage_tokens: Tokens of the embedding model in a passage of a collection's document; None is 150
            words or 1,000 characters. Documents that are stored keep their passages until they are sent again.
        max_collections: Maximum number of collections of a tenant; 0 refuses new ones.
        collection_store: ``KIND:key=value,...`` of a vector store that searches the collections, as in ``retriever``;
            None compares vectors in this process. Collections stay in the store that they were created in.
        request_templates: Prompt templates that requests may choose with ``posfix.template``: ``none``, ``shipped``
            (by name), or ``any`` (also with fields of their own).
        max_collection_documents: Maximum number of documents in a collection.
        index_check_seconds: Time between two looks for a new version of the indexes, which is then served; 0 for none.
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
    read_timeout_seconds: float = Field(default=60.0, gt=0)
    keep_alive_seconds: int = Field(default=75, ge=1)
    api_key: SecretStr | None = Field(default=None, min_length=1)
    quotas_without_redis: Literal["local", "reject"] = "local"
    allow_anonymous: bool = False
    require_key: bool = False
    metrics_address: str | None = Field(default=None, pattern=r"^.+:\d{1,5}$")
    cors_origins: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s*]+$")], ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_body_bytes: int = Field(default=8 * 1024**2, ge=1)
    max_documents: int = Field(default=1000, ge=1)
    ungrounded: Literal["never", "chat", "request"] = "chat"
    log_format: Literal["json", "text"] = "json"
    source_text: bool = True
    tenant_field: str | None = Field(default=None, min_length=1)
    data_dir: Path = Field(default_factory=default_data_dir)
    max_collections: int = Field(default=100, ge=0)
    collection_passage_tokens: int | None = Field(default=None, ge=1)
    collection_store: str | None = Field(default=None, pattern=r"^[a-z0-9_-]+:.*$", repr=False)
    request_templates: Literal["none", "shipped", "any"] = "none"
    max_collection_documents: int = Field(default=100_000, ge=1)
    index_check_seconds: float = Field(default=2.0, ge=0)


class TorchrunSettings(CheckedSettings):
    """Environment variables of a process that torchrun started, ``RANK`` and ``WORLD_SIZE``, without prefix.

    Attributes:
        rank: Rank of this process, from 0; None if torchrun did not start it.
        world_size: Number of processes on all machines.
    """

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    rank: int | None = None
    world_size: int | None = None


class OpenTelemetrySettings(CheckedSettings):
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
        of_signals = self.otel_exporter_otlp_traces_endpoint or self.otel_exporter_otlp_metrics_endpoint
        return bool(self.otel_exporter_otlp_endpoint or of_signals)


@functools.cache
def _names() -> dict[str, tuple[str, ...]]:
    """Return the names of settings by group, Settings' own first."""
    kinds = (Settings, CacheSettings, PassageStoreSettings, TelemetrySettings, RemoteSettings, ServiceSettings)
    groups = {kind.group() or "": kind for kind in kinds}
    return {group: tuple(name for name in kind.model_fields if name not in groups) for group, kind in groups.items()}


@functools.cache
def _variables() -> dict[str, str]:
    """Return the variable of each setting, and of each group in JSON, by its part after the prefix."""
    groups = {group: f"{group}_".upper() if group else "" for group in _names()}
    names = [f"{prefix}{name}".upper() for group, prefix in groups.items() for name in _names()[group]]
    names += [group.upper() for group in groups if group in Settings.model_fields]
    return {name: f"{_PREFIX}{name}" for name in names}


def _check_variables() -> None:
    """Raise for a variable with the prefix of settings that is not one: misspelled, it would be ignored in silence."""
    known = _OTHER_VARIABLES.union(_variables().values())
    for variable in os.environ:
        name = variable.upper()
        if name.startswith(_PREFIX) and name not in known and not _KUBERNETES_VARIABLE.search(name):
            hint = nearest_name(name.removeprefix(_PREFIX), _variables())
            raise ConfigError(f"{variable} is not a setting{hint}; correct or unset it")


def _import_plugins() -> None:
    """Import the plug-ins of ``RAG_POSFIX_PLUGINS``. No configuration file names any: it would run their code."""
    import_modules(filter(None, (name.strip() for name in os.environ.get(_PLUGINS_VARIABLE, "").split(","))))


@contextmanager
def plugin_modules(names: Sequence[str]) -> Iterator[None]:
    """Import those of ``RAG_POSFIX_PLUGINS`` and more plug-ins, in this process and in those that it starts.

    Args:
        names: Modules by name, or files that end in ``.py``.

    Raises:
        ConfigError: a module does not exist, or its code fails.
    """
    former = os.environ.get(_PLUGINS_VARIABLE)
    _import_plugins()
    import_modules(names)
    if names:
        os.environ[_PLUGINS_VARIABLE] = ",".join(filter(None, (former, *names)))
    try:
        yield
    finally:
        _restore(_PLUGINS_VARIABLE, former)


def _restore(variable: str, former: str | None) -> None:
    if former is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = former


def _in_file(group: str | None) -> dict[str, Any]:
    """Return the settings of a group in the configuration file, which are none without a file."""
    path = os.environ.get(_CONFIG_VARIABLE)
    return read_config_file(Path(path), _names())[group] if path and group is not None else {}


@contextmanager
def config_file(path: Path | None = None) -> Iterator[Path | None]:
    """Read settings from a configuration file too, in this process and in those that it starts.

    The value of the block is the file that was found and not named, or None.

    Args:
        path: The file; None is the file of ``RAG_POSFIX_CONFIG`` or, if that is not set, ``rag-posfix.toml`` in the
            working folder, if there is one.

    Raises:
        ConfigError: the file cannot be read, or has a key that is not a setting.
    """
    former, found = os.environ.get(_CONFIG_VARIABLE), None
    if path is not None:
        read_config_file(path, _names())  # now, and not when the first settings are made
    elif former is None and Path(CONFIG_FILE).is_file():
        path = found = Path(CONFIG_FILE)
    if path is not None:
        os.environ[_CONFIG_VARIABLE] = str(path)
    try:
        yield found
    finally:
        _restore(_CONFIG_VARIABLE, former)
