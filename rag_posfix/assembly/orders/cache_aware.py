"""An order that starts with the leading passages of a recent prompt, to reuse their cached keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from rag_posfix.assembly.orders.base import ORDERS, Order, OrderFacts, best_first, ranks
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
        best first. For an order-free method the loss is 0, and the documents after p are sorted by content key: the
        same documents make the same prompt, whatever their scores.
    Cost: recent prompts times documents; no model is used.
    Limits: the cached keys and values may have been evicted meanwhile; then the displacement gains nothing. Methods
        that read passages independently reuse them in any order and do not need this one.

    Args:
        bound: Maximum loss, 0 to 1. 0 reuses only prefixes of the best-first order.

    Raises:
        ConfigError: ``bound`` is outside of 0 to 1.
    """

    name: ClassVar[str] = "cache_aware"

    bound: Annotated[float, Number(0, 1)] = 0.25

    def __call__(self, facts: OrderFacts) -> tuple[int, ...]:
        """Return the permutation."""
        ranked = best_first(facts.relevance, facts.keys)
        if len(facts.keys) != len(ranked):
            return ranked
        rest = tuple(sorted(ranked, key=lambda i: facts.keys[i])) if facts.order_free else ranked
        rank = ranks(facts.relevance, facts.keys)
        best, best_order = (0, 0.0), rest
        for prefix in _shared_prefixes(facts):
            if len(prefix) < best[0] or not prefix:
                continue
            in_prefix = set(prefix)
            order = (*prefix, *(index for index in rest if index not in in_prefix))
            loss = 0.0 if facts.order_free else displacement(order, rank)
            if loss <= self.bound and (-len(prefix), loss) < (-best[0], best[1]):
                best, best_order = (len(prefix), loss), order
        return best_order


def displacement(order: Sequence[int], rank: Sequence[int]) -> float:
    """Return the distance between an order and the ranking, in [0, 1].

    Formula: Spearman's footrule divided by its maximum, sum_i |position_i - rank_i| / floor(n^2 / 2).

    Args:
        order: The index of the document at each position.
        rank: The rank of each document.
    """
    largest = len(order) ** 2 // 2
    return sum(abs(place - rank[index]) for place, index in enumerate(order)) / largest if largest else 0.0


def _shared_prefixes(facts: OrderFacts) -> Iterator[tuple[int, ...]]:
    """Yield the prefixes of recent prompts whose documents are all given, as indices; of each prompt longest first."""
    index_of = {key: index for index, key in enumerate(facts.keys)}
    for prompt in dict.fromkeys(facts.recent):
        shared: list[int] = []
        for key in prompt:
            if key not in index_of or index_of[key] in shared:
                break
            shared.append(index_of[key])
        for length in range(len(shared), 0, -1):
            yield tuple(shared[:length])
