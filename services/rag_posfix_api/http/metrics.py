"""Metrics at ``/metrics``, one registry per app. Labels come from short closed lists, never from a client.

The log of the service process, the fields of a request's line, and identifiers.

The log has one line for each record, as JSON or as text, with the id of the request.

Lines of requests hold no text of clients: routes log numbers and names only, and of an exception that is logged during
a request its type and places are shown, because its message may quote a prompt.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rag_posfix.contracts.answer import FormFault
from rag_posfix.contracts.retrieval import RerankerHealth
from rag_posfix.text import visible

ANSWER, SCORE = "answer", "score"
"""The two kinds of work that wait in queues of their own: answers, and scores or vectors of texts."""

Statistics = Callable[[], Mapping[str, Any]]
"""Returns the statistics of a cache (``TieredAnswerCache.stats``, ``PassageStore.stats``)."""

_REQUEST_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_STAGE_BUCKETS = (0.001, 0.0025, 0.005, *_REQUEST_BUCKETS)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_BATCH_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_TIER = ("cache", "tier")


class Metrics:
    """The metrics of one app.

    Args:
        in_flight: Returns the number of running and waiting requests.
        working: Returns the number of requests that use the model.
        is_ready: Returns whether the model is loaded.
        oldest: Returns the age of the oldest open request in seconds.
        waiting: Returns the number of requests that wait, by kind of work.
        kv_cache_bytes: Returns the bytes of the KV caches of the answers that are decoded.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        working: Callable[[], int],
        is_ready: Callable[[], bool],
        oldest: Callable[[], float],
        waiting: Mapping[str, Callable[[], int]],
        kv_cache_bytes: Callable[[], int],
    ) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._histogram(
            "request_duration_seconds",
            "From the first byte of a request to the last of its response.",
            _REQUEST_BUCKETS,
            ["route", "status"],
        )
        self._codes = self._counter(
            "requests", "Requests by the format of the response and its outcome.", ["dialect", "code"]
        )
        self._count_outcomes()
        self._stages = self._histogram("stage_duration_seconds", "One stage of one answer.", _STAGE_BUCKETS, ["stage"])
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the admission of a request to the first text that the model wrote for it.",
            _STAGE_BUCKETS,
        )
        self.output_token = self._histogram(
            "time_per_output_token_seconds", "Time for each token of an answer after its first.", _TOKEN_BUCKETS
        )
        self._queue = self._histogram(
            "queue_duration_seconds",
            "How long each answer or scoring waited for the model, whether or not it got it.",
            _STAGE_BUCKETS,
            ["work"],
        )
        self.decode_batch = self._histogram("decode_batch_size", "Answers that share one decode step.", _BATCH_BUCKETS)
        self._tokens = self._counter("tokens", "Tokens of all answers, cached ones included.", ["kind"])
        self._model_tokens = self._counter(
            "model_tokens",
            "Tokens of answers that the model computed: read, reused from the passage KV store, or generated.",
            ["kind"],
            ("read", "reused", "generated"),
        )
        self._cache = self._counter("cache_requests", "Look-ups in the answer cache.", ["result"])
        self.tied_rankings = self._counter("reranking_ties", "Rankings whose documents all have one score.")
        self.counted = CountedElsewhere()
        self.registry.register(self.counted)
        self.info = Info("rag_posfix", "What is served.", registry=self.registry)
        self._gauge("in_flight_requests", "Requests being answered or waiting.").set_function(in_flight)
        self._gauge("oldest_request_seconds", "Age of the oldest open request.").set_function(oldest)
        self._gauge("kv_cache_bytes", "Keys and values of the answers that are decoded together.").set_function(
            kv_cache_bytes
        )
        self._gauge("running_answers", "Answers that the model works on.").set_function(working)
        self._gauge("ready", "1 once the model is loaded and verified.").set_function(is_ready)
        queued = self._gauge("waiting_requests", "Requests that wait for the model.", ["work"])
        for work, count in waiting.items():
            self._queue.labels(work)
            queued.labels(work).set_function(count)

    def _count_outcomes(self) -> None:
        # By tenant of the key file; "" is the single key, or no key.
        self._tenant_requests = self._counter("tenant_requests", "Requests by tenant and outcome.", ["tenant", "code"])
        self._tenant_tokens = self._counter("tenant_tokens", "Tokens of answers by tenant.", ["tenant", "kind"])
        self._tenant_seconds = self._counter(
            "tenant_model_seconds",
            "Time in which the model worked for a tenant; requests that run together share it equally.",
            ["tenant", "work"],
        )
        self._malformed = self._counter(
            "malformed_answers", "Answers whose text has a fault of form.", ["fault"], get_args(FormFault)
        )
        self.unsupported = self._counter(
            "unsupported",
            "Answers that no passage supports, by what was done: refused or answered.",
            ["action"],
            ("refused", "answered"),
        )

    def count_request(self, route: str, status: int, seconds: float, dialect: str, code: str, tenant: str) -> None:
        """Count one request; ``dialect`` is the API format of the response, ``code`` is ``ok`` or the error's code."""
        self._requests.labels(route, str(status)).observe(seconds)
        self._codes.labels(dialect, code).inc()
        self._tenant_requests.labels(tenant, code).inc()

    def count_work(self, work: str, tenant: str, seconds: float) -> None:
        """Count the time in which the model worked for a request of a tenant; ``work`` as for ``count_wait``."""
        self._tenant_seconds.labels(tenant, work).inc(seconds)

    def count_wait(self, work: str, seconds: float) -> None:
        """Count how long a request waited: ``work`` is ``ANSWER`` or ``SCORE``."""
        self._queue.labels(work).observe(seconds)

    def count_answer(
        self, timings: Mapping[str, float], tokens: Mapping[str, int], cache: str, fault: str | None, tenant: str
    ) -> None:
        """Count one answer.

        Args:
            timings: Seconds by stage.
            tokens: Tokens by kind: ``prompt``, ``cached`` (some of the prompt) and ``completion``.
            cache: ``hit``, ``miss`` or ``off``.
            fault: The fault of the text's form, if it has one.
        """
        for stage, seconds in timings.items():
            self._stages.labels(stage).observe(seconds)
        for kind, count in tokens.items():
            self._tokens.labels(kind).inc(count)
            self._tenant_tokens.labels(tenant, kind).inc(count)
        self._cache.labels(cache).inc()
        if fault is not None:
            self._malformed.labels(fault).inc()
        if cache != "hit":
            reused = tokens.get("cached", 0)
            self._model_tokens.labels("read").inc(max(tokens.get("prompt", 0) - reused, 0))
            self._model_tokens.labels("reused").inc(reused)
            self._model_tokens.labels("generated").inc(tokens.get("completion", 0))

    def _counter(
        self, name: str, documentation: str, labels: Sequence[str] = (), values: Iterable[str] = ()
    ) -> Counter:
        """Return a counter, which begins at 0 for each of ``values`` of its label."""
        counter = Counter(f"rag_posfix_{name}", documentation, labels, registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"rag_posfix_{name}", documentation, labels, registry=self.registry)

    def _histogram(
        self, name: str, documentation: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(f"rag_posfix_{name}", documentation, labels, buckets=buckets, registry=self.registry)


class CountedElsewhere(Collector):
    """Metrics that rerankers, caches and collections count themselves: they are read when the metrics are collected.

    Attributes:
        health: Counts the failed rerankings.
        caches: The statistics of each cache, for its tiers.
        passages: The statistics of the passage KV store over all of its tiers; None without a store.
        collections: The failures of collections' files by action.
    """

    def __init__(self) -> None:
        self.health = RerankerHealth()
        self.caches: Mapping[str, Statistics] = {}
        self.passages: Statistics | None = None
        self.collections: Mapping[str, int] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from self._failures()
        yield from self._tiers()
        yield from self._lookups()

    def _failures(self) -> Iterator[Metric]:
        failures = _counter(
            "reranking_failures", "Rerankings that left documents in their order.", "reranker", "reason"
        )
        in_a_row = _gauge(
            "reranking_failures_in_a_row", "Failed rerankings since the last one that did not fail.", "reranker"
        )
        for name, counts in self.health.failures().items():
            for reason, count in counts.counts.items():
                failures.add_metric([name, reason], count)
            in_a_row.add_metric([name], counts.in_a_row)
        collections = _counter(
            "collection_failures", "Reads and writes of collections that failed; a change was then not made.", "action"
        )
        for action, count in self.collections.items():
            collections.add_metric([action], count)
        yield from (failures, in_a_row, collections)

    def _tiers(self) -> Iterator[Metric]:
        """Yield one family for each field of ``TierStats``."""
        lookups = _counter(
            "cache_tier_lookups",
            "Look-ups by tier: hit, miss, or skipped while the circuit breaker is open.",
            *_TIER,
            "result",
        )
        counters = {
            "errors": _counter("cache_tier_errors", "Operations of a tier that failed.", *_TIER),
            "corrupt": _counter("cache_tier_damaged_entries", "Entries that were damaged; each was a miss.", *_TIER),
            "evictions": _counter("cache_tier_evictions", "Entries removed to make room for others.", *_TIER),
        }
        # A tier that cannot tell its size cheaply has no sample.
        sizes = {
            "entries": _gauge("cache_tier_entries", "Entries that a tier holds.", *_TIER),
            "bytes": _gauge("cache_tier_bytes", "Size of these entries.", *_TIER),
        }
        available = _gauge(
            "cache_tier_available", "1 unless the tier is failing and its circuit breaker is open.", *_TIER
        )
        for cache, stats in self.caches.items():
            for tier in stats().get("tiers", ()):
                name = tier["name"]
                for result, key in (("hit", "hits"), ("miss", "misses"), ("skipped", "skipped")):
                    lookups.add_metric([cache, name, result], tier.get(key, 0))
                for key, counter in counters.items():
                    counter.add_metric([cache, name], tier.get(key, 0))
                for key, size in sizes.items():
                    if tier.get(key) is not None:
                        size.add_metric([cache, name], tier[key])
                available.add_metric([cache, name], tier.get("available", True))
        yield from (lookups, *counters.values(), *sizes.values(), available)

    def _lookups(self) -> Iterator[Metric]:
        lookups = _counter(
            "passage_lookups", "Passages that were looked up: hit where a tier had their keys and values.", "result"
        )
        hit_bytes = _counter("passage_hit_bytes", "Keys and values that were reused.")
        dropped = _counter("passage_dropped_writes", "Passages that did not fit into the write queue.")
        pending = _gauge("passage_pending_writes", "Passages in the write queue.")
        if self.passages is not None:
            counts = self.passages()
            for result, field in (("hit", "hits"), ("miss", "misses")):
                lookups.add_metric([result], counts.get(field, 0))
            hit_bytes.add_metric([], counts.get("hit_bytes", 0))
            dropped.add_metric([], counts.get("dropped_writes", 0))
            pending.add_metric([], counts.get("pending_writes", 0))
        yield from (lookups, hit_bytes, dropped, pending)


def _counter(name: str, documentation: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"rag_posfix_{name}", documentation, labels=labels)


def _gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rag_posfix_{name}", documentation, labels=labels)


LogFormat = Literal["json", "text"]

REQUEST_ID: ContextVar[str | None] = ContextVar("rag_posfix_request_id", default=None)
"""The id of the request that this thread or task works for."""


class Identifiers:
    """Makes unique identifiers of 32 hexadecimal digits, not secret: 16 random ones of this object, and a count.

    A random identifier for each request would cost a system call, during which another thread takes the interpreter's
    lock: the request then waits until that thread gives it back. Safe to call from any thread.
    """

    def __init__(self) -> None:
        self._start = uuid.uuid4().hex[:16]
        self._count = itertools.count(1)

    def new(self) -> str:
        """Return an identifier that no other call returned."""
        return f"{self._start}{next(self._count):016x}"


@dataclass(slots=True)
class LogFields:
    """The fields of a request's log line: numbers and registry names, never text of a client or a model.

    Attributes:
        cache: ``hit``, ``miss`` or ``off``.
        documents: Number of documents in the request.
        grounded: Whether passages were there and the model wrote from them.
        support: Whether they support the answer: ``yes``, ``partly``, ``no`` or ``unknown``.
        truncated: Number of passages that were cut to fit.
        left_out: Number of passages that were left out for want of room.
        error: Code of the error, if there was one.
        key: Id of the API key, which is not the key.
        tenant: Tenant of the key, for metrics and spans; not logged.
        tokens: Tokens by kind.
        timings: Seconds by stage.
    """

    mitigation: str | None = None
    order: str | None = None
    cache: str | None = None
    documents: int | None = None
    grounded: bool | None = None
    support: str | None = None
    truncated: int | None = None
    left_out: int | None = None
    error: str | None = None
    key: str | None = None
    tenant: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set."""
        names = [name for name in self.__slots__ if name not in ("tenant", "tokens", "timings")]
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        fields |= {f"{kind}_tokens": count for kind, count in self.tokens.items()}
        stages = {stage: round(seconds, 6) for stage, seconds in self.timings.items()}
        return fields | {"stage_seconds": stages} if stages else fields


class _Formatter(logging.Formatter):
    """Collects the fields of a line: the fields of every record, and the entries of ``extra={"fields": {...}}``."""

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = REQUEST_ID.get()
        if request_id is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["traceback"] = self.formatException(record.exc_info) if request_id is None else _format_stack(error)
        return line


class JsonFormatter(_Formatter):
    """Formats a record as a JSON object: time, level, logger, message, request id, and fields."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.fields(record), default=str)


class TextFormatter(_Formatter):
    """Formats a record for people: time, level, logger, message, and the other fields as ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; after an exception, its traceback follows."""
        line = self.fields(record)
        trace = line.pop("traceback", None)
        first = " ".join(str(line.pop(name)) for name in ("time", "level", "logger", "message"))
        pairs = "".join(f" {name}={json.dumps(value, default=str)}" for name, value in line.items())
        text = visible((first + pairs).replace("\r", "\\r").replace("\n", "\\n"))  # no value forges a record
        return text if trace is None else f"{text}\n{visible(trace)}"


def configure_logging(log_format: LogFormat = "json", level: int = logging.INFO) -> None:
    """Send the log of this process to stderr. For the service process only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for library in ("faiss", "sentence_transformers", "uvicorn.error"):
        logging.getLogger(library).setLevel(max(level, logging.WARNING))  # else how each was loaded and started


def _format_stack(error: BaseException) -> str:
    """Return the type of an error and where it was raised, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    return "\n".join([type(error).__name__, *(f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames)])
