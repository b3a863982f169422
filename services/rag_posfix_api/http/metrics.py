"""Metrics at ``/metrics``, one registry per app. Labels come from short closed lists, never from a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from rag_posfix.contracts.retrieval import RerankerHealth
from rag_posfix_api.http.collectors import CacheTiers, PassageCounts, RerankingFailures, Statistics

ANSWER, SCORE = "answer", "score"
"""The two kinds of work that wait in queues of their own: answers, and scores or vectors of texts."""

_REQUEST_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_STAGE_BUCKETS = (0.001, 0.0025, 0.005, *_REQUEST_BUCKETS)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_BATCH_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class Metrics:
    """The metrics of one app.

    Args:
        in_flight: Returns the number of running and waiting requests.
        working: Returns the number of requests that use the model.
        is_ready: Returns whether the model is loaded.
        oldest: Returns the age of the oldest open request in seconds.
        waiting: Returns the number of requests that wait, by kind of work.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        working: Callable[[], int],
        is_ready: Callable[[], bool],
        oldest: Callable[[], float],
        waiting: Mapping[str, Callable[[], int]],
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
        self._stages = self._histogram("stage_duration_seconds", "One stage of one answer.", _STAGE_BUCKETS, ["stage"])
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the admission of a request to the first text that the model wrote for it.",
            _STAGE_BUCKETS,
        )
        self._token = self._histogram(
            "time_per_output_token_seconds", "Time for each token of an answer after its first.", _TOKEN_BUCKETS
        )
        self._queue = self._histogram(
            "queue_duration_seconds",
            "How long a request waited for the model, whether or not it got it.",
            _STAGE_BUCKETS,
            ["work"],
        )
        self._batch = self._histogram("decode_batch_size", "Answers that share one decode step.", _BATCH_BUCKETS)
        self._tokens = self._counter("tokens", "Tokens of all answers, cached ones included.", ["kind"])
        self._model_tokens = self._counter(
            "model_tokens",
            "Tokens of answers that the model computed: read, reused from the passage KV store, or generated.",
            ["kind"],
        )
        for kind in ("read", "reused", "generated"):
            self._model_tokens.labels(kind)
        self._cache = self._counter("cache_requests", "Look-ups in the answer cache.", ["result"])
        self._tied = self._counter("reranking_ties", "Rankings whose documents all have one score.")
        self._reranking = RerankingFailures()
        self._tiers = CacheTiers()
        self._passages = PassageCounts()
        for collector in (self._reranking, self._tiers, self._passages):
            self.registry.register(collector)
        self._info = Info("rag_posfix", "What is served.", registry=self.registry)
        self._gauge("in_flight_requests", "Requests being answered or waiting.").set_function(in_flight)
        self._gauge("oldest_request_seconds", "Age of the oldest open request.").set_function(oldest)
        self._gauge("running_answers", "Answers that the model works on.").set_function(working)
        self._gauge("ready", "1 once the model is loaded and verified.").set_function(is_ready)
        queued = self._gauge("waiting_requests", "Requests that wait for the model.", ["work"])
        for work, count in waiting.items():
            self._queue.labels(work)
            queued.labels(work).set_function(count)

    def served(self, version: str, model: str) -> None:
        """Set the version and the model of the info metric."""
        self._info.info({"version": version, "model": model})

    def count_reranking(self, health: RerankerHealth) -> None:
        """Read the failures of rerankers from ``health``."""
        self._reranking.health = health

    def count_caches(self, answers: Statistics | None, passages: Statistics | None) -> None:
        """Register functions that return the statistics of the answer cache and of the passage KV store."""
        named = {"answers": answers, "passages": passages}
        self._tiers.stats = {cache: stats for cache, stats in named.items() if stats is not None}
        self._passages.stats = passages

    def tied_ranking(self) -> None:
        """Count a ranking whose documents all have the same score."""
        self._tied.inc()

    def request(self, route: str, status: int, seconds: float, dialect: str, code: str) -> None:
        """Count one request.

        Args:
            seconds: How long it took.
            dialect: The wire format of the response.
            code: ``ok``, or the code of the error.
        """
        self._requests.labels(route, str(status)).observe(seconds)
        self._codes.labels(dialect, code).inc()

    def first_token(self, seconds: float) -> None:
        """Count the time until the first text of an answer."""
        self._first_token.observe(seconds)

    def each_token(self, seconds: float) -> None:
        """Count the mean time of the tokens of an answer after its first."""
        self._token.observe(seconds)

    def queued(self, work: str, seconds: float) -> None:
        """Count how long a request waited: ``work`` is ``ANSWER`` or ``SCORE``."""
        self._queue.labels(work).observe(seconds)

    def decode_step(self, answers: int) -> None:
        """Count one decode step that so many answers share."""
        self._batch.observe(answers)

    def answer(self, timings: Mapping[str, float], tokens: Mapping[str, int], cache: str) -> None:
        """Count one answer.

        Args:
            tokens: Tokens by kind: ``prompt``, ``cached`` (a part of the prompt) and ``completion``.
            cache: ``hit``, ``miss`` or ``off``.
        """
        for stage, seconds in timings.items():
            self._stages.labels(stage).observe(seconds)
        for kind, count in tokens.items():
            self._tokens.labels(kind).inc(count)
        self._cache.labels(cache).inc()
        if cache != "hit":
            reused = tokens.get("cached", 0)
            self._model_tokens.labels("read").inc(max(tokens.get("prompt", 0) - reused, 0))
            self._model_tokens.labels("reused").inc(reused)
            self._model_tokens.labels("generated").inc(tokens.get("completion", 0))

    def _counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"rag_posfix_{name}", documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"rag_posfix_{name}", documentation, labels, registry=self.registry)

    def _histogram(
        self, name: str, documentation: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(f"rag_posfix_{name}", documentation, labels, buckets=buckets, registry=self.registry)
