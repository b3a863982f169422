"""Metrics that caches and rerankers count themselves: they are read when the metrics are collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rag_posfix.contracts.retrieval import RerankerHealth

Statistics = Callable[[], Mapping[str, Any]]
"""Returns the statistics of a cache (``TieredAnswerCache.stats``, ``PassageStore.stats``)."""

_TIER = ("cache", "tier")


class RerankingFailures(Collector):
    """The failed rerankings that rerankers count."""

    def __init__(self) -> None:
        self.health = RerankerHealth()

    def collect(self) -> Iterator[Metric]:
        """Yield the counter and the failures in a row."""
        counted = CounterMetricFamily(
            "rag_posfix_reranking_failures",
            "Rerankings that left documents in their order.",
            labels=["reranker", "reason"],
        )
        in_a_row = GaugeMetricFamily(
            "rag_posfix_reranking_failures_in_a_row",
            "Failed rerankings since the last one that did not fail.",
            labels=["reranker"],
        )
        for name, failures in self.health.failures().items():
            for reason, count in failures.counts.items():
                counted.add_metric([name, reason], count)
            in_a_row.add_metric([name], failures.in_a_row)
        yield from (counted, in_a_row)


class CacheTiers(Collector):
    """The counters of the tiers of all caches."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Statistics] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each field of ``TierStats``."""
        lookups = CounterMetricFamily(
            "rag_posfix_cache_tier_lookups",
            "Look-ups by tier: hit, miss, or rest where the circuit breaker kept the tier from being asked.",
            labels=[*_TIER, "result"],
        )
        counters = {
            "errors": CounterMetricFamily(
                "rag_posfix_cache_tier_errors", "Operations of a tier that failed.", labels=_TIER
            ),
            "corrupt": CounterMetricFamily(
                "rag_posfix_cache_tier_damaged_entries", "Entries that were damaged; each was a miss.", labels=_TIER
            ),
            "evictions": CounterMetricFamily(
                "rag_posfix_cache_tier_evictions", "Entries removed to make room for others.", labels=_TIER
            ),
        }
        # A tier that cannot tell its size cheaply has no sample.
        sizes = {
            "entries": GaugeMetricFamily("rag_posfix_cache_tier_entries", "Entries that a tier holds.", labels=_TIER),
            "bytes": GaugeMetricFamily("rag_posfix_cache_tier_bytes", "Size of these entries.", labels=_TIER),
        }
        available = GaugeMetricFamily(
            "rag_posfix_cache_tier_available",
            "1 unless the tier is failing and its circuit breaker is open.",
            labels=_TIER,
        )
        for cache, stats in self.stats.items():
            for tier in stats().get("tiers", ()):
                name = tier["name"]
                for result, field in (("hit", "hits"), ("miss", "misses"), ("rest", "skipped")):
                    lookups.add_metric([cache, name, result], tier.get(field, 0))
                for field, counter in counters.items():
                    counter.add_metric([cache, name], tier.get(field, 0))
                for field, size in sizes.items():
                    if tier.get(field) is not None:
                        size.add_metric([cache, name], tier[field])
                available.add_metric([cache, name], tier.get("available", True))
        yield from (lookups, *counters.values(), *sizes.values(), available)


class PassageCounts(Collector):
    """The counters of the passage KV store over all of its tiers."""

    def __init__(self) -> None:
        self.stats: Statistics | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield the counters and the length of the write queue; no samples without a store."""
        lookups = CounterMetricFamily(
            "rag_posfix_passage_lookups",
            "Passages that were looked up: hit where a tier had their keys and values.",
            labels=["result"],
        )
        read = CounterMetricFamily("rag_posfix_passage_hit_bytes", "Keys and values that were reused.")
        dropped = CounterMetricFamily(
            "rag_posfix_passage_dropped_writes", "Passages that did not fit into the write queue."
        )
        pending = GaugeMetricFamily("rag_posfix_passage_pending_writes", "Passages in the write queue.")
        if self.stats is not None:
            counted = self.stats()
            for result, field in (("hit", "hits"), ("miss", "misses")):
                lookups.add_metric([result], counted.get(field, 0))
            read.add_metric([], counted.get("hit_bytes", 0))
            dropped.add_metric([], counted.get("dropped_writes", 0))
            pending.add_metric([], counted.get("pending_writes", 0))
        yield from (lookups, read, dropped, pending)
