"""The state of the service that routes share, in ``app.state``: the loaded pipeline, admission and metrics."""

from __future__ import annotations

import logging
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated

import anyio.to_thread
from fastapi import Depends, Request
from langchain_core.documents import Document

from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.contracts.generator import Generator, PassageReader
from rag_posfix.contracts.request import Sampling
from rag_posfix.errors import GenerationError, RagPosfixError
from rag_posfix.generation.batching.stepped import SteppedGenerator
from rag_posfix.parameters import shown
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix_api.http.errors import (
    ModelNotFoundError,
    NotReadyError,
    StoppingError,
    UnsupportedFeatureError,
)
from rag_posfix_api.http.facts import Facts
from rag_posfix_api.http.identifiers import Identifiers
from rag_posfix_api.http.metrics import Metrics
from rag_posfix_api.runtime.admission import Admission
from rag_posfix_api.runtime.admitted import AdmittedCache, AdmittedGenerator
from rag_posfix_api.runtime.jobs import Jobs

if TYPE_CHECKING:
    from rag_posfix.generation.batching.scheduler import BatchingGenerator

__all__ = ["ReadyService", "Service", "ServiceState", "package_version", "service_of"]

_log = logging.getLogger(__name__)


class Service:
    """The state of one app.

    Args:
        settings: The model to load, and defaults of requests.
        limits: Settings of the service.
    """

    def __init__(self, settings: Settings, limits: ServiceSettings) -> None:
        self.settings = settings
        self.limits = limits
        self.started = int(time.time())
        self.identifiers = Identifiers()
        self.chat = self._jobs(limits.max_concurrent)
        self.rerank = self._jobs(1)  # scores are not batched over requests
        self.metrics = Metrics(
            lambda: self.in_flight, lambda: self.chat.admission.working, lambda: self.is_ready, self._oldest_seconds
        )
        self._pipeline: Pipeline | None = None
        self._loaded: Pipeline | None = None
        self._batching: BatchingGenerator | None = None
        self._generator: Generator | None = None
        self._draining = False
        self._load_error: RagPosfixError | None = None
        self._reason = "the model is being loaded; try again later"

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline, with admission around its generator.

        Raises:
            NotReadyError: the pipeline is not loaded, or its model has failed.
        """
        if self._pipeline is None:
            raise NotReadyError(self._reason)
        if self._failure is not None:
            raise NotReadyError(f"the model cannot answer any more: {self._failure}; start the service again")
        return self._pipeline

    @property
    def is_ready(self) -> bool:
        """Whether the pipeline is loaded, its model has not failed, and the service is not stopping."""
        return self._pipeline is not None and self._failure is None and not self._draining

    @property
    def load_error(self) -> RagPosfixError | None:
        """Why the pipeline could not be loaded, or None. It does not become ready any more."""
        return self._load_error

    @property
    def in_flight(self) -> int:
        """Number of open requests."""
        return self.chat.admission.in_flight + self.rerank.admission.in_flight

    @property
    def _failure(self) -> str | None:
        """The reason why the model cannot answer any more (a process of a split model died), or None."""
        failure: str | None = getattr(self._generator, "failure", None)
        return failure

    @property
    def model_id(self) -> str:
        """Name of the served model."""
        return self.pipeline.generator.model_id

    @property
    def reader(self) -> PassageReader:
        """The served model, for those who read its attention.

        Raises:
            NotReadyError: as ``pipeline``.
            UnsupportedFeatureError: the generator gives no attention.
        """
        pipeline = self.pipeline
        if not isinstance(self._generator, PassageReader):
            raise UnsupportedFeatureError(
                f"{pipeline.generator.model_id!r} gives no attention; serve a model that this process loads itself"
            )
        return self._generator

    def adopt(self, pipeline: Pipeline) -> None:
        """Serve ``pipeline`` from now on. The pipeline itself is not changed."""
        self._generator = pipeline.generator
        self.metrics.served(package_version(), pipeline.generator.model_id)
        counts = getattr(pipeline.reranker, "counts", None)
        if callable(counts):
            self.metrics.count_reranking(counts)
        caches = {"answers": pipeline.cache, "passages": pipeline.passages}
        counted = {name: getattr(cache, "stats", None) for name, cache in caches.items()}
        self.metrics.count_caches({name: stats for name, stats in counted.items() if callable(stats)})
        generator = AdmittedGenerator(self._batched(pipeline.generator), self.chat.admission)
        cache = None if pipeline.cache is None else AdmittedCache(pipeline.cache, self.chat.admission)
        self._pipeline = pipeline.with_generator(generator, cache)

    async def load(self) -> None:
        """Build, verify and warm up the pipeline in a worker thread, then serve it. Never raises."""
        started = time.monotonic()
        try:
            # Shutting down does not wait for a download.
            pipeline = await anyio.to_thread.run_sync(_build, self.settings, abandon_on_cancel=True)
        except Exception as error:
            known = isinstance(error, RagPosfixError)
            told = " ".join(str(error).split()) if known else f"{type(error).__name__}, see the server's log"
            self._reason = f"the model could not be loaded: {told}"
            self._load_error = error if isinstance(error, RagPosfixError) else GenerationError(self._reason)
            _log.error("%s", self._reason, exc_info=None if known else error)
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
        """Raise if no new request can be answered.

        Raises:
            NotReadyError: the model is not loaded or has failed, or the service is stopping.
        """
        if self._draining:
            raise StoppingError("the service is stopping; ask another replica, or again later")
        _ = self.pipeline

    def close(self) -> None:
        """Stop the model, and close the pipeline that ``load`` built; a pipeline of the caller is not closed."""
        if self._batching is not None:
            self._batching.close()
        if self._loaded is not None:
            self._loaded.close()

    def check_model(self, name: str) -> None:
        """Raise if ``name`` is not a name of the served model.

        Raises:
            ModelNotFoundError: it is another model.
        """
        if name not in (self.model_id, self.settings.model, "default", ""):
            raise ModelNotFoundError(
                f"model {shown(name)} is not served here; use {self.model_id!r} or 'default'", param="model"
            )

    def check_embedding_model(self, name: str) -> None:
        """Raise if ``name`` is not a name of the embedding model.

        Raises:
            ModelNotFoundError: it is another model.
        """
        if name not in (self.settings.embedding_model, "default", ""):
            raise ModelNotFoundError(
                f"embedding model {shown(name)} is not served; use {self.settings.embedding_model!r} or 'default'",
                param="model",
            )

    def record(self, answer: Answer, facts: Facts) -> None:
        """Count an answer in the metrics, and set the log fields of its request."""
        usage = answer.usage
        tokens = {
            "prompt": usage.prompt_tokens,
            "completion": usage.completion_tokens,
            "cached": usage.cached_tokens,
        }
        cache = "hit" if answer.cached else "miss" if "cache" in answer.timings else "off"
        self.metrics.answer(answer.timings, tokens, cache)
        facts.mitigation, facts.order, facts.cache = answer.mitigation, answer.order, cache
        facts.tokens, facts.timings = tokens, dict(answer.timings)

    def _batched(self, generator: Generator) -> Generator:
        """Return ``generator`` with continuous batching, if it supports that and the settings allow it."""
        if self.limits.max_concurrent == 1 or not isinstance(generator, SteppedGenerator):
            return generator
        from rag_posfix.generation.batching.scheduler import BatchingGenerator  # torch

        self._batching = BatchingGenerator(generator, self.limits.max_concurrent)
        return self._batching

    def _jobs(self, at_once: int) -> Jobs:
        limits = self.limits
        waiting = limits.max_concurrent + limits.max_queue - at_once
        admission = Admission(at_once, waiting, limits.queue_timeout_seconds, limits.max_open)
        return Jobs(admission, limits.request_timeout_seconds)

    def _oldest_seconds(self) -> float:
        return max(self.chat.admission.oldest_seconds, self.rerank.admission.oldest_seconds)


def package_version() -> str:
    """Return the installed version, or "unknown" for a source tree that is not installed."""
    try:
        return version("rag-posfix")
    except PackageNotFoundError:
        return "unknown"


def _build(settings: Settings) -> Pipeline:
    """Return a pipeline that has embedded and answered one question, which reveals a missing or broken model."""
    from rag_posfix.pipeline.build import build_pipeline  # torch and transformers: not before they are needed

    pipeline = build_pipeline(settings)
    if pipeline.embeddings is not None:
        pipeline.embeddings.embed_query("Is the service warm?")
    passage = Document(page_content="The service is warm.", metadata={"relevance_score": 1.0})
    pipeline.ask(
        Question("Is the service warm?", documents=[passage], sampling=Sampling(max_tokens=2), use_cache=False)
    )
    return pipeline


def service_of(request: Request) -> Service:
    """Return the state of the app of ``request``."""
    service = request.app.state.service
    if not isinstance(service, Service):
        raise NotReadyError("the service has not started")
    return service


# Dependencies are coroutines: FastAPI would run plain functions in worker threads.
async def _service(request: Request) -> Service:
    return service_of(request)


async def _ready_service(request: Request) -> Service:
    service = service_of(request)
    service.check_ready()  # refuse before the work
    return service


ServiceState = Annotated[Service, Depends(_service)]
"""The service, ready or not."""

ReadyService = Annotated[Service, Depends(_ready_service)]
"""The service with its model loaded; 503 otherwise."""
