"""The state of the service that routes share, in ``app.state``: the loaded pipeline, admission and metrics.

The indexes of the service whose folders are followed: when they are reloaded, and which of them cannot be.

One check for all who ask at the same time: probes come from everywhere, without a key.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import anyio
import anyio.to_thread
from fastapi import Depends, Request
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from starlette.types import Receive

from rag_posfix.caching.answers.tiered import tenant_salt
from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.contracts.generator import Generator, display_name
from rag_posfix.contracts.request import MitigationChoice, Sampling, scoped_salt
from rag_posfix.contracts.retrieval import RerankerHealth, combine_filters, filter_key
from rag_posfix.errors import ConfigError, GenerationError, OverloadedError, RagPosfixError, UpstreamError
from rag_posfix.parameters import shown
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.pipeline.precompute import precompute
from rag_posfix.pipeline.tracing import NOOP_TRACER
from rag_posfix.retrieval.indexing import FollowedIndex
from rag_posfix.retrieval.ingest.passages import PassageSize
from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix.telemetry.build import OFF, Telemetry
from rag_posfix_api.collections.collection import Collection, open_external_store
from rag_posfix_api.collections.store import Collections
from rag_posfix_api.http.auth import CALLER, KeyChecker, Quotas, SharedQuotas
from rag_posfix_api.http.errors import RequestError
from rag_posfix_api.http.metrics import ANSWER, SCORE, Identifiers, LogFields, Metrics, Statistics
from rag_posfix_api.http.middleware import UnreadResponses
from rag_posfix_api.keys.store import KeyStore
from rag_posfix_api.runtime.admission import Admission, AdmittedCache, AdmittedGenerator
from rag_posfix_api.runtime.jobs import Jobs, PrecomputeJobs, PrecomputeState, Progress, batch_permit

if TYPE_CHECKING:
    from rag_posfix.generation.batching.scheduler import BatchingGenerator


T = TypeVar("T")


class ServedIndexes:
    """The indexes of a pipeline; ``pipeline`` returns None before it is loaded.

    Args:
        check_seconds: How often ``follow`` looks at the folders; 0 for never.
    """

    def __init__(self, pipeline: Callable[[], Pipeline | None], check_seconds: float) -> None:
        self._pipeline = pipeline
        self._check_seconds = check_seconds
        self._wanted = asyncio.Event()

    def by_name(self) -> dict[str, FollowedIndex]:
        """Return the indexes that follow a folder; that of questions without a name is ``""``."""
        pipeline = self._pipeline()
        retrievers = {} if pipeline is None else {"": pipeline.retriever, **pipeline.indexes}
        return {name: index for name, index in retrievers.items() if isinstance(index, FollowedIndex)}

    def reload(self, *, force: bool = True) -> set[str]:
        """Serve the versions in the folders; return the names of the indexes with a new one."""
        return {name for name, index in self.by_name().items() if index.reload(force=force)}

    def reload_soon(self) -> None:
        """Let ``follow`` reload the indexes at once. To be called in its event loop."""
        self._wanted.set()

    async def follow(self) -> None:
        """Serve each new version in the folders, until the task is cancelled."""
        self._wanted = asyncio.Event()  # of this event loop
        while True:
            with anyio.move_on_after(self._check_seconds or None):
                await self._wanted.wait()
            force = self._wanted.is_set()
            self._wanted.clear()
            await anyio.to_thread.run_sync(partial(self.reload, force=force), abandon_on_cancel=True)

    def describe_failing(self) -> str | None:
        """Return which indexes have a version that is not served, and since when, without paths; None if none has."""
        lines = [
            f"{f'index {name}' if name else 'the index'} cannot be renewed since "
            f"{index.failing_since:%Y-%m-%dT%H:%M:%SZ}: the version before is served, see the server's log"
            for name, index in self.by_name().items()
            if index.failure is not None
        ]
        return "; ".join(lines) or None


_FRESH_SECONDS = 1.0


class SharedCheck:
    """Runs a function in one thread at a time; its result holds for a second. For one event loop at a time.

    Args:
        function: Raises what is wrong. One that hangs is not started again while it does.
        timeout: How long ``wait`` waits for it.
        subject: Names it in the error of a timeout.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        function: Callable[[], None],
        timeout: float,
        subject: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._function = function
        self._timeout = timeout
        self._subject = subject
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._ended = 0.0

    async def wait(self) -> None:
        """Raise what the function raises; RequestError if it has no result in time."""
        task = self._task
        if task is None or (task.done() and self._clock() - self._ended >= _FRESH_SECONDS) or _of_other_loop(task):
            task = self._task = asyncio.create_task(self._run())
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # perhaps nobody waits then
        done, _ = await asyncio.wait({task}, timeout=self._timeout)
        if not done:
            raise RequestError(f"{self._subject} does not answer within {self._timeout:g} seconds", code="not_ready")
        task.result()

    async def _run(self) -> None:
        try:
            await anyio.to_thread.run_sync(self._function, abandon_on_cancel=True)
        finally:
            self._ended = self._clock()


def _of_other_loop(task: asyncio.Task[None]) -> bool:
    return task.get_loop() is not asyncio.get_running_loop()


_log = logging.getLogger(__name__)

_FLUSH_SECONDS = 2.0
"""How long the last spans may take to be sent when the service stops."""
_CHECK_SECONDS = 5.0
"""How long the vector store may take to answer a readiness probe."""
MAX_UNREAD = 8
"""Largest responses of a tenant that wait for their clients to read them."""
_TOKENS_PER_ANSWER = 8192
"""Tokens for each running answer, where the settings give no limit."""


class Service:
    """The state of one app; ``telemetry`` says where traces and metrics go."""

    def __init__(self, settings: Settings, limits: ServiceSettings, telemetry: Telemetry = OFF) -> None:
        self.settings = settings
        self._telemetry = telemetry
        self.limits = limits
        self.keys = KeyStore(limits.data_dir)
        self.key_checker = KeyChecker(
            self.keys, limits.api_key, always=limits.require_key, open_to_proxies=limits.allow_anonymous
        )
        url, lease = settings.cache.redis_url, limits.request_timeout_seconds + limits.read_timeout_seconds
        self.quotas = (
            Quotas() if url is None else SharedQuotas(url.get_secret_value(), limits.quotas_without_redis, lease)
        )
        size = PassageSize(tokens=limits.collection_passage_tokens)
        folder = limits.data_dir / "collections"
        self.unread = UnreadResponses(MAX_UNREAD * limits.max_body_bytes)
        self.collections = Collections(folder, limits.max_collections, limits.max_collection_documents, size)
        self.precomputing = PrecomputeJobs()
        self.reranker_health = RerankerHealth()
        self.started = int(time.time())
        self.identifiers = Identifiers()
        self.metrics = Metrics(
            lambda: self.in_flight,
            lambda: self.chat.admission.working,
            lambda: self.is_ready,
            lambda: max(self.chat.admission.oldest_seconds, self.rerank.admission.oldest_seconds),
            {ANSWER: lambda: self.chat.admission.waiting, SCORE: lambda: self.rerank.admission.waiting},
            lambda: 0 if self._batching is None else self._batching.kv_cache_bytes,
        )
        self.metrics.counted.collections = self.collections.failures.counts
        self.chat = self._jobs(limits.max_concurrent, ANSWER)
        self.rerank = self._jobs(1, SCORE)  # scores are not batched over requests
        self._pipeline: Pipeline | None = None
        self._loaded: Pipeline | None = None
        self._batching: BatchingGenerator | None = None
        self._generator: Generator | None = None
        self._model_name = ""
        self._store_check = SharedCheck(self._check_stores, _CHECK_SECONDS, "the vector store")
        self.indexes = ServedIndexes(lambda: self._pipeline, limits.index_check_seconds)
        self.embedding_model_id = display_name(settings.embedding_model)
        self._draining = False
        self._load_error: RagPosfixError | None = None
        self._reason = "the model is being loaded; try again later"

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the caller: with admission around its generator, and the cache entries of the tenant.

        It retrieves what the filter of the caller's key and ``tenant_field`` let through.

        Raises:
            RequestError: the pipeline is not loaded, or its model has failed.
        """
        caller, field = CALLER.get(), self.limits.tenant_field
        of_tenant = {field: {"$eq": caller.tenant}} if field is not None and caller.tenant else None
        return self._filtered(combine_filters(of_tenant, caller.filter))

    @property
    def collection_pipeline(self) -> Pipeline:
        """The pipeline of the caller for a collection of the tenant, whose documents need no ``tenant_field``."""
        return self._filtered(CALLER.get().filter)

    def _filtered(self, metadata_filter: Mapping[str, Any] | None) -> Pipeline:
        pipeline, salt, key_filter = self._served, CALLER.get().salt, CALLER.get().filter
        if metadata_filter is not None:
            pipeline = pipeline.with_filter(metadata_filter)
        if key_filter is not None:  # ``cached_tokens`` of a text that it sends would tell whether it is stored
            salt = scoped_salt(salt, filter_key(key_filter))
        return pipeline.with_tenant(salt) if salt else pipeline

    @property
    def _served(self) -> Pipeline:
        """The pipeline of no tenant, for data that all callers share."""
        if self._pipeline is None:
            raise RequestError(self._reason, code="not_ready")
        if (failure := self.failure) is not None:
            raise RequestError(str(failure), code="not_ready")
        return self._pipeline

    @property
    def is_ready(self) -> bool:
        """Whether the pipeline is loaded, its model has not failed, and the service is not stopping."""
        return self._pipeline is not None and self.failure is None and not self._draining

    @property
    def failure(self) -> RagPosfixError | None:
        """Why no question will be answered any more, or None: the pipeline could not be loaded, or a process died.

        The process that dies is one of a split model; its generator says so by an attribute ``failure``.
        """
        if self._load_error is not None:
            return self._load_error
        failure = None if self._generator is None else self._generator.failure
        if failure is None:
            return None
        return GenerationError(f"the model cannot answer any more: {failure}; start the service again")

    @property
    def in_flight(self) -> int:
        """Number of open requests."""
        return self.chat.admission.in_flight + self.rerank.admission.in_flight

    @property
    def model_id(self) -> str:
        """Name of the served model, for responses."""
        _ = self._served  # raises before the model is there
        return self._model_name

    @property
    def reader(self) -> Generator:
        """The served model, if it gives attention; raises ``RequestError`` otherwise."""
        name = self.model_id  # raises before the model is there
        if self._generator is None or "attention" not in self._generator.capabilities:
            raise RequestError(
                f"{name!r} gives no attention; serve a model that this process loads itself", code="unsupported"
            )
        return self._generator

    def _open_collection_store(self, pipeline: Pipeline) -> None:
        """Open the vector store of the collections, if the settings name one that is not open."""
        address = self.limits.collection_store
        if address is None or self.collections.external is not None:
            return
        if pipeline.embeddings is None:
            raise ConfigError("collection_store is set and there is no embedding model; serve a pipeline with one")
        self.collections.external = open_external_store(address, pipeline.embeddings)

    def adopt(self, pipeline: Pipeline) -> None:
        """Serve ``pipeline`` from now on. The pipeline itself is not changed."""
        from rag_posfix.generation.batching.scheduler import unbatched  # torch

        self._open_collection_store(pipeline)
        self._generator = unbatched(pipeline.generator)  # the service has batches of its own size
        self._model_name = self.limits.served_model_name or display_name(pipeline.generator.model_id)
        self.metrics.info.info({"version": package_version(), "model": self._model_name})
        health = getattr(pipeline.reranker, "health", None)
        if isinstance(health, RerankerHealth):
            self.reranker_health = self.metrics.counted.health = health
        statistics: dict[str, Statistics] = {
            name: stats
            for name, cache in (("answers", pipeline.cache), ("passages", pipeline.passages))
            if callable(stats := getattr(cache, "stats", None))
        }
        self.metrics.counted.caches, self.metrics.counted.passages = statistics, statistics.get("passages")
        limits, admission = self.limits, self.chat.admission
        # By default every prompt that the model can read fits.
        default_tokens = max(pipeline.generator.context_window, _TOKENS_PER_ANSWER * limits.max_concurrent)
        admission.limit_tokens(limits.max_tokens_in_flight or default_tokens)
        generator = AdmittedGenerator(self._add_batching(self._generator), admission, self.metrics)
        cache = None if pipeline.cache is None else AdmittedCache(pipeline.cache, admission)
        served = pipeline.with_generator(generator, cache)
        # A pipeline that its caller traces already stays as it is.
        tracer = self._telemetry.question_tracer()
        self._pipeline = served if tracer is NOOP_TRACER else served.with_tracer(tracer)

    async def load(self) -> None:
        """Build, verify and warm up the pipeline in a worker thread, then serve it. Never raises."""
        started = time.monotonic()
        try:
            # Shutting down does not wait for a download.
            pipeline = await anyio.to_thread.run_sync(_build, self.settings, abandon_on_cancel=True)
            await anyio.to_thread.run_sync(self._open_collection_store, pipeline, abandon_on_cancel=True)
        except Exception as error:
            is_known = isinstance(error, RagPosfixError)
            cause = " ".join(str(error).split()) if is_known else f"{type(error).__name__}, see the server's log"
            self._reason = f"the model could not be loaded: {cause}"
            self._load_error = error if isinstance(error, RagPosfixError) else GenerationError(self._reason)
            _log.error("%s", self._reason, exc_info=None if is_known else error)
            return
        self._loaded = pipeline
        self.adopt(pipeline)
        _log.info("serving %s, loaded in %.1f s", pipeline.generator.model_id, time.monotonic() - started)

    def drain(self) -> None:
        """Answer new requests with 503 from now on. Running ones continue."""
        self._draining = True

    def stop(self) -> None:
        """End the requests that are still running: their answers are errors that say so."""
        self._draining = True
        self.chat.admission.stop()
        self.rerank.admission.stop()

    def check_ready(self) -> None:
        """Raise ``RequestError`` if the model is not loaded or has failed, or the service is stopping."""
        if self._draining:
            raise RequestError("the service is stopping; ask another replica, or again later", code="stopping")
        _ = self._served

    async def check_stores(self) -> None:
        """Raise ``RequestError`` if a vector store, of questions or of collections, cannot be reached.

        A retriever that has one says so by a method ``check``; all have ``_CHECK_SECONDS`` together. One check runs at
        a time, for all callers of a second.
        """
        if self._stores():
            await self._store_check.wait()

    def _stores(self) -> list[Callable[[], object]]:
        checks = [getattr(holder, "check", None) for holder in (self._served.retriever, self.collections.external)]
        return [check for check in checks if callable(check)]

    def _check_stores(self) -> None:
        try:
            for check in self._stores():
                check()
        except RagPosfixError as error:
            raise RequestError(str(error), code="not_ready") from error

    def close(self) -> None:
        """Stop the model, and close the pipeline that ``load`` built; a pipeline of the caller is not closed."""
        with ExitStack() as stack:  # in reverse; after a failure to close one, the others are closed too
            stack.callback(self._telemetry.flush, _FLUSH_SECONDS)
            if self._loaded is not None:
                stack.callback(self._loaded.close)
            if self._batching is not None:
                stack.callback(self._batching.close)
            stack.callback(self.precomputing.close)
            stack.callback(self.quotas.close)

    @property
    def embeddings(self) -> Embeddings:
        """The embedding model of the pipeline; raises ``RequestError`` without one."""
        embeddings = self._served.embeddings
        if embeddings is None:
            raise RequestError("this server has no embedding model; serve a pipeline with one", code="unsupported")
        return embeddings

    def collection(self, name: str) -> Collection:
        """Return a collection of the caller; raise ``RequestError`` if the caller has none of this name."""
        caller = CALLER.get()
        return self.collections.get(caller.tenant, name, self.embeddings, partial(self._forget, caller.salt))

    def delete_collection(self, name: str) -> None:
        """Delete a collection of the caller, and the cache entries of its documents."""
        caller = CALLER.get()
        documents = self.collections.delete(caller.tenant, name, self.collection(name))
        self.precomputing.forget((caller.tenant, name))
        if documents:
            self._forget(caller.salt, documents)

    def precompute(self, name: str, mitigation: MitigationChoice | None) -> PrecomputeState:
        """Start to compute the keys and values of a collection of the caller in the background.

        Raises:
            RequestError: the caller has none of this name, the generator keeps no keys and values, or the job runs.
        """
        engine, caller, pipeline = self._generator, CALLER.get(), self.pipeline
        if engine is None or "precompute" not in engine.capabilities or engine.passages is None:
            raise RequestError(
                "this server keeps no keys and values of passages; turn the store on", code="unsupported"
            )
        collection, salt = self.collection(name), tenant_salt(pipeline.defaults.tenant, "")
        passages = engine.passages

        def work(progress: Progress, cancelled: threading.Event) -> int:
            with passages.begin():
                return precompute(
                    engine,
                    collection.documents(),
                    mitigation or pipeline.defaults.mitigation,
                    template=pipeline.assembler.template,
                    salt=salt,
                    progress=progress,
                    permit=partial(batch_permit, self.chat.admission, cancelled, caller.tenant),
                )

        return self.precomputing.start((caller.tenant, name), work)

    def check_model(self, name: str) -> None:
        """Raise ``RequestError`` unless ``name`` is a name of the served model."""
        if name not in (self.model_id, self._served.generator.model_id, self.settings.model, "default", ""):
            raise RequestError(
                f"model {shown(name)} is not served here; use {self.model_id!r} or 'default'",
                param="model",
                code="model_not_found",
            )

    def check_embedding_model(self, name: str) -> None:
        """Raise ``RequestError`` unless ``name`` is a name of the embedding model."""
        if name not in (self.embedding_model_id, self.settings.embedding_model, "default", ""):
            raise RequestError(
                f"embedding model {shown(name)} is not served; use {self.embedding_model_id!r} or 'default'",
                param="model",
                code="model_not_found",
            )

    def record(self, answer: Answer, fields: LogFields) -> None:
        """Count an answer in the metrics, and set the log fields of its request."""
        usage = answer.usage
        tokens = {
            "prompt": usage.prompt_tokens,
            "completion": usage.completion_tokens,
            "cached": usage.cached_tokens,
        }
        cache = "hit" if answer.cached else "miss" if "cache" in answer.timings else "off"
        self.metrics.count_answer(answer.timings, tokens, cache, answer.form_fault, CALLER.get().tenant)
        is_refused = any(reason == "unsupported" for _, reason in answer.dropped)
        if is_refused or (answer.grounded and answer.support == "no"):
            self.metrics.unsupported.labels("refused" if is_refused else "answered").inc()
        fields.mitigation, fields.order, fields.cache = answer.mitigation, answer.order, cache
        n_left_out = sum(reason == "budget" for _, reason in answer.dropped)
        fields.grounded, fields.support = answer.grounded, answer.support
        fields.truncated, fields.left_out = len(answer.truncated), n_left_out
        fields.tokens, fields.timings = tokens, dict(answer.timings)

    def _forget(self, salt: str, documents: Sequence[Document]) -> None:
        """Drop a tenant's cache entries of documents that were removed from a collection."""
        if self._pipeline is not None:
            self._pipeline.invalidate(documents, salt)

    def _add_batching(self, generator: Generator) -> Generator:
        """Return ``generator`` with continuous batching, if it supports that and the settings allow it."""
        if self.limits.max_concurrent == 1:
            return generator
        from rag_posfix.generation.batching.scheduler import BatchingGenerator, batched  # torch

        generator = batched(generator, self.limits.max_concurrent, self.metrics.decode_batch.observe)
        self._batching = generator if isinstance(generator, BatchingGenerator) else None
        return generator

    def _jobs(self, at_once: int, work: str) -> Jobs:
        limits = self.limits
        waiting = limits.max_concurrent + limits.max_queue - at_once
        admission = Admission(
            at_once,
            waiting,
            limits.queue_timeout_seconds,
            limits.max_open,
            limits.max_queued_tokens,
            on_release=lambda ticket: self.metrics.count_work(work, ticket.tenant, ticket.model_seconds),
        )
        return Jobs(admission, limits.request_timeout_seconds, partial(self.metrics.count_wait, work))


def package_version() -> str:
    """Return the installed version, or "unknown" for a source tree that is not installed."""
    try:
        return version("rag-posfix")
    except PackageNotFoundError:
        return "unknown"


def _build(settings: Settings) -> Pipeline:
    """Return a pipeline that has embedded and answered one question, which reveals a missing or broken model."""
    from rag_posfix.pipeline.build import build_pipeline  # torch and transformers: not before they are needed

    pipeline = build_pipeline(settings, follows_index=True)
    if pipeline.embeddings is not None:
        pipeline.embeddings.embed_query("Is the service warm?")
    passage = Document(page_content="The service is warm.", metadata={"relevance_score": 1.0})
    try:
        pipeline.ask(
            Question(
                "Is the service warm?",
                documents=[passage],
                sampling=Sampling(max_tokens=2),
                use_cache=False,
                allow_unsupported=True,
            )
        )
    except (UpstreamError, OverloadedError) as error:  # a remote model may come up later, and is asked each time
        _log.warning("the server of the model did not answer yet: %s", error)
    return pipeline


# Dependencies are coroutines: FastAPI would run plain functions in worker threads.
async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _ready_service(request: Request) -> Service:
    service = await _service(request)
    service.check_ready()  # reject before the work
    return service


ServiceState = Annotated[Service, Depends(_service)]
"""The service, ready or not."""

ReadyService = Annotated[Service, Depends(_ready_service)]
"""The service with its model loaded; 503 otherwise."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is being answered: the service, the events of its client, and its log fields, to be filled in."""

    service: Service
    receive: Receive
    fields: LogFields

    async def compute(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``, run in a worker thread; stop when the client leaves."""
        return await self.service.chat.run(self.receive, function)

    async def score(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``, run in a worker thread while nothing else embeds or reranks."""
        return await self.service.rerank.run(self.receive, function, permit=True)

    def record(self, answer: Answer) -> None:
        """Count an answer."""
        self.service.record(answer, self.fields)


async def _call(request: Request, service: ReadyService) -> Call:
    return Call(service, request.receive, request.state.log_fields)


ReadyCall = Annotated[Call, Depends(_call)]
"""The request, with ``ReadyService``."""
