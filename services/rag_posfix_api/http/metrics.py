"""Metrics at ``/metrics``, one registry per app. Labels come from short closed lists, never from a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

__all__ = ["Metrics"]

_REQUEST_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_STAGE_BUCKETS = (0.001, 0.0025, 0.005, *_REQUEST_BUCKETS)


class _RerankingFailures(Collector):
    """Counters that the reranker holds, read when the metrics are collected."""

    def __init__(self) -> None:
        self.counts: Callable[[], Mapping[str, int]] = dict

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "rag_posfix_reranking_failures", "Rerankings that left documents in their order.", labels=["reason"]
        )
        for reason, count in self.counts().items():
            family.add_metric([reason], count)
        yield family


class _CacheTiers(Collector):
    """Counters that the tiers of both caches hold, read when the metrics are collected."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Callable[[], Mapping[str, Any]]] = {}

    def collect(self) -> Iterator[Metric]:
        lookups = CounterMetricFamily(
            "rag_posfix_cache_tier_lookups",
            "Look-ups by tier: hit, miss, or rest where the circuit breaker kept the tier from being asked.",
            labels=["cache", "tier", "result"],
        )
        failures = CounterMetricFamily(
            "rag_posfix_cache_tier_errors", "Operations of a tier that failed.", labels=["cache", "tier"]
        )
        available = GaugeMetricFamily(
            "rag_posfix_cache_tier_available",
            "1 unless the tier is failing and its circuit breaker is open.",
            labels=["cache", "tier"],
        )
        for cache, stats in self.stats.items():
            for tier in stats().get("tiers", ()):
                name = tier["name"]
                for result, field in (("hit", "hits"), ("miss", "misses"), ("rest", "skipped")):
                    lookups.add_metric([cache, name, result], tier.get(field, 0))
                failures.add_metric([cache, name], tier.get("errors", 0))
                available.add_metric([cache, name], tier.get("available", True))
        yield from (lookups, failures, available)


class Metrics:
    """The metrics of one app.

    Args:
        in_flight: Returns the number of running and waiting requests.
        working: Returns the number of requests that use the model.
        is_ready: Returns whether the model is loaded.
        oldest: Returns the age of the oldest open request in seconds.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        working: Callable[[], int],
        is_ready: Callable[[], bool],
        oldest: Callable[[], float],
    ) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Histogram(
            "rag_posfix_request_duration_seconds",
            "From the first byte of a request to the last of its response.",
            ["route", "status"],
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._stages = Histogram(
            "rag_posfix_stage_duration_seconds",
            "One stage of one answer.",
            ["stage"],
            buckets=_STAGE_BUCKETS,
            registry=self.registry,
        )
        self._tokens = Counter("rag_posfix_tokens", "Tokens read and written.", ["kind"], registry=self.registry)
        self._cache = Counter(
            "rag_posfix_cache_requests", "Look-ups in the answer cache.", ["result"], registry=self.registry
        )
        self._reranking = _RerankingFailures()
        self.registry.register(self._reranking)
        self._tied = Counter(
            "rag_posfix_reranking_ties", "Rankings whose documents all have one score.", registry=self.registry
        )
        self._tiers = _CacheTiers()
        self.registry.register(self._tiers)
        self._info = Info("rag_posfix", "What is served.", registry=self.registry)
        Gauge(
            "rag_posfix_in_flight_requests", "Requests being answered or waiting.", registry=self.registry
        ).set_function(in_flight)
        Gauge(
            "rag_posfix_oldest_request_seconds", "Age of the oldest open request.", registry=self.registry
        ).set_function(oldest)
        Gauge("rag_posfix_running_answers", "Answers that the model works on.", registry=self.registry).set_function(
            working
        )
        Gauge("rag_posfix_ready", "1 once the model is loaded and verified.", registry=self.registry).set_function(
            is_ready
        )

    def served(self, version: str, model: str) -> None:
        """Set the version and the model of the info metric."""
        self._info.info({"version": version, "model": model})

    def count_reranking(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Register a function that returns the number of failed rerankings by reason."""
        self._reranking.counts = counts

    def count_caches(self, stats: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
        """Register functions that return the statistics of caches, by name of the cache."""
        self._tiers.stats = stats

    def tied_ranking(self) -> None:
        """Count a ranking whose documents all have the same score."""
        self._tied.inc()

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count one request; ``route`` is the template of its path."""
        self._requests.labels(route, str(status)).observe(seconds)

    def answer(self, timings: Mapping[str, float], tokens: Mapping[str, int], cache: str) -> None:
        """Count one answer.

        Args:
            timings: Seconds by stage.
            tokens: Tokens by kind.
            cache: ``hit``, ``miss`` or ``off``.
        """
        for stage, seconds in timings.items():
            self._stages.labels(stage).observe(seconds)
        for kind, count in tokens.items():
            self._tokens.labels(kind).inc(count)
        self._cache.labels(cache).inc()
