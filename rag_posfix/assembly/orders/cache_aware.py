"""The order that begins as a recent prompt began, so that what the model read of it is read no second time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from rag_posfix.assembly.orders.base import ORDERS, Order, OrderFacts, best_first, ranks
from rag_posfix.parameters import Number

__all__ = ["CacheAware", "displacement"]


@ORDERS.register("cache_aware")
@dataclass(frozen=True, slots=True)
class CacheAware(Order):
    """As many leading passages as possible as in a recent prompt; the others follow best first.

    For methods that read passages one after another (``none`` and what edits it), whose keys and values are found
    again only while all passages before are the same.

    Source: ours; the idea of ordering for prefix reuse is ContextPilot's (MLSys 2026).
    Formula: every beginning p of every recent prompt whose documents are all here is a candidate: p, then the other
        documents best first. Taken is the one with the most passages in p whose loss is at most ``bound``; of equals
        the one of less loss, then that of the newer prompt. Loss: sum_i |place_i - rank_i| / floor(n^2 / 2), the
        displacement from best first, 0 for that order and 1 for its reverse. No candidate: best first.
        A method that is order-free loses nothing, so there the bound is not asked, and what follows p is sorted by
        content: the same documents make the same prompt, whatever their scores.
    Cost: recent prompts times documents; none in the model.
    Limits: what the recent prompts left may be gone from the store meanwhile; then a displacement within the bound
        bought nothing. Methods that read passages apart find them in any order and need none of this.

    Args:
        bound: The most loss allowed, 0 to 1. 0 reuses only what best first gives anyway.

    Raises:
        ConfigError: ``bound`` is outside of 0 to 1.
    """

    name: ClassVar[str] = "cache_aware"

    bound: Annotated[float, Number(0, 1)] = 0.25

    def __call__(self, facts: OrderFacts) -> tuple[int, ...]:
        """Return the permutation."""
        ranked = best_first(facts.relevance)
        if len(facts.keys) != len(ranked):
            return ranked
        rest = tuple(sorted(ranked, key=lambda i: facts.keys[i])) if facts.order_free else ranked
        rank = ranks(facts.relevance)
        best, taken = (0, 0.0), rest
        for leading in _beginnings(facts):
            if len(leading) < best[0] or not leading:
                continue
            inside = set(leading)
            order = (*leading, *(index for index in rest if index not in inside))
            loss = 0.0 if facts.order_free else displacement(order, rank)
            if loss <= self.bound and (-len(leading), loss) < (-best[0], best[1]):
                best, taken = (len(leading), loss), order
        return taken


def displacement(order: Sequence[int], rank: Sequence[int]) -> float:
    """Return how far documents stand from their rank on average, as a share of the most that is possible.

    Formula: Spearman's footrule, sum_i |place_i - rank_i| / floor(n^2 / 2).

    Args:
        order: Which document stands in each place.
        rank: The rank of each document.
    """
    most = len(order) ** 2 // 2
    return sum(abs(place - rank[index]) for place, index in enumerate(order)) / most if most else 0.0


def _beginnings(facts: OrderFacts) -> Iterator[tuple[int, ...]]:
    """Yield the beginnings of recent prompts whose documents are all here, as indices, the longest of each first."""
    index_of = {key: index for index, key in enumerate(facts.keys)}
    for prompt in dict.fromkeys(facts.recent):
        shared: list[int] = []
        for key in prompt:
            if key not in index_of or index_of[key] in shared:
                break
            shared.append(index_of[key])
        for length in range(len(shared), 0, -1):
            yield tuple(shared[:length])
