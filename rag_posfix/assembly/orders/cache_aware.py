"""An order that starts with the leading passages of a recent prompt, to reuse their cached keys and values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from rag_posfix.assembly.orders.base import ORDERS, Order, OrderInputs, best_first, ranks
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import Number


@ORDERS.register("cache_aware")
@dataclass(frozen=True, slots=True)
class CacheAware(Order):
    """The longest possible prefix of a recent prompt; the other passages follow best first.

    For methods that read passages one after another (``none`` and methods that edit its plan): keys and values of a
    passage can be reused only if all passages before it are the same.

    Source: ours; the idea of ordering for prefix reuse is ContextPilot's (MLSys 2026).
    Formula: for every prefix p of every recent prompt whose documents are all given, one candidate order: p, then the
        other documents best first. The result is the candidate with the longest p whose loss is at most ``bound``; of
        equal length, the one with the lower loss, then that of the newer prompt. Loss: sum_i |position_i - rank_i| /
        floor(n^2 / 2), the displacement from best first: 0 for that order, 1 for its reverse. Without a candidate:
        best first. For an order-invariant method the loss is 0, and the documents after p are sorted by content key:
        equal sets of documents make equal prompts, whatever their scores.
    Cost: recent prompts times documents; no model is used.
    Limits: the cached keys and values may have been evicted meanwhile; then the displacement gains nothing. Methods
        that read passages independently reuse them in any order and do not need this one.

    Args:
        bound: Maximum loss, 0 to 1. 0 reuses only prefixes of the best-first order.

    Raises:
        ConfigError: ``bound`` is outside of 0 to 1.
    """

    name = "cache_aware"
    reads_recent = True

    bound: Annotated[float, Number(0, 1)] = 0.25

    def __call__(self, inputs: OrderInputs) -> tuple[int, ...]:
        ranked = best_first(inputs.relevance, inputs.keys)
        if len(inputs.keys) != len(ranked):
            return ranked
        default_order = tuple(sorted(ranked, key=lambda i: inputs.keys[i])) if inputs.order_free else ranked
        rank = ranks(inputs.relevance, inputs.keys)
        best, best_order = (0, 0.0), default_order
        for prefix in _shared_prefixes(inputs):
            if len(prefix) < best[0] or not prefix:
                continue
            in_prefix = set(prefix)
            order = (*prefix, *(index for index in default_order if index not in in_prefix))
            loss = 0.0 if inputs.order_free else displacement(order, rank)
            if loss <= self.bound and (-len(prefix), loss) < (-best[0], best[1]):
                best, best_order = (len(prefix), loss), order
        return best_order


def displacement(order: Sequence[int], rank: Sequence[int]) -> float:
    """Return the distance between an order and the ranking, in [0, 1].

    Formula: Spearman's footrule divided by its maximum, sum_i |position_i - rank_i| / floor(n^2 / 2).
    """
    largest = len(order) ** 2 // 2
    return sum(abs(position - rank[index]) for position, index in enumerate(order)) / largest if largest else 0.0


def _shared_prefixes(inputs: OrderInputs) -> Iterator[tuple[int, ...]]:
    """Yield the prefixes of recent prompts whose documents are all given, as indices; of each prompt longest first."""
    index_of = {key: index for index, key in enumerate(inputs.keys)}
    for prompt in dict.fromkeys(inputs.recent):
        shared: list[int] = []
        for key in prompt:
            if key not in index_of or index_of[key] in shared:
                break
            shared.append(index_of[key])
        for length in range(len(shared), 0, -1):
            yield tuple(shared[:length])


class RecentPrompts:
    """Keeps the content keys of the passages of recent prompts, in prompt order. Safe to share between threads.

    Args:
        most_scopes: Maximum number of scopes; the least recently used is dropped.
        most_prompts: Maximum number of prompts per scope; the oldest is dropped.

    Raises:
        ConfigError: a maximum is below 1.
    """

    def __init__(self, *, most_scopes: int = 64, most_prompts: int = 32) -> None:
        if most_scopes < 1 or most_prompts < 1:
            raise ConfigError(f"most_scopes={most_scopes} and most_prompts={most_prompts} must be >= 1")
        self._most_scopes = most_scopes
        self._most_prompts = most_prompts
        self._scopes: OrderedDict[str, OrderedDict[tuple[str, ...], None]] = OrderedDict()
        self._lock = threading.Lock()

    def recent(self, scope: str) -> tuple[tuple[str, ...], ...]:
        """Return the prompts of a scope, the newest first.

        Args:
            scope: Prompts share keys and values only within a scope: the same tenant, method and tokens before the
                passages.
        """
        with self._lock:
            return tuple(reversed(self._scopes.get(scope, ())))

    def add(self, scope: str, keys: Sequence[str]) -> None:
        """Add a prompt as the newest of its scope.

        Args:
            scope: As in ``recent``.
            keys: A content hash of each passage, in prompt order. A prompt without passages is not added.
        """
        if not keys:
            return
        with self._lock:
            prompts = self._scopes.setdefault(scope, OrderedDict())
            self._scopes.move_to_end(scope)
            prompts[tuple(keys)] = None
            prompts.move_to_end(tuple(keys))
            if len(prompts) > self._most_prompts:
                prompts.popitem(last=False)
            if len(self._scopes) > self._most_scopes:
                self._scopes.popitem(last=False)

    def drop(self, keys: Sequence[str]) -> None:
        """Drop every prompt with one of these passages."""
        removed = set(keys)
        with self._lock:
            for prompts in self._scopes.values():
                for prompt in [prompt for prompt in prompts if removed.intersection(prompt)]:
                    del prompts[prompt]
