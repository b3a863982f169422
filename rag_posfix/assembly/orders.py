"""Orders that passages can stand in, as pure permutations of indices.

An order sees one relevance score per document and a seed, never the documents: what it returns depends on nothing
else. The score None means that nothing scored the document; such documents rank below all scored ones, and where no
document has a score, the order they came in counts as best first.
"""

from __future__ import annotations

import random as _random
from collections.abc import Callable, Sequence

from rag_posfix.errors import ConfigError
from rag_posfix.registry import Registry

__all__ = ["ORDERS", "Order", "best_first", "permute"]

Order = Callable[[Sequence[float | None], int], tuple[int, ...]]
"""``(relevance, seed) -> permutation``: entry ``i`` is the index of the document that stands in position ``i``."""

ORDERS: Registry[Order] = Registry("order")


def best_first(relevance: Sequence[float | None]) -> tuple[int, ...]:
    """Return the indices from the highest score to the lowest; ties keep the order they came in.

    Args:
        relevance: One score per document, None where there is none.
    """
    return tuple(sorted(range(len(relevance)), key=lambda i: _descending(relevance[i])))


def _descending(score: float | None) -> tuple[bool, float]:
    return (True, 0.0) if score is None else (False, -score)


def permute(name: str, relevance: Sequence[float | None], seed: int = 0) -> tuple[int, ...]:
    """Return the permutation that the order called ``name`` makes.

    Args:
        name: A name in ``ORDERS``.
        relevance: One score per document, None where there is none.
        seed: For orders that draw; the others ignore it.

    Raises:
        UnknownNameError: no order has this name.
        ConfigError: the order (one that was added from outside) returned something else than a permutation.
    """
    indices = tuple(ORDERS.get(name)(relevance, seed))
    if sorted(indices) != list(range(len(relevance))):
        raise ConfigError(
            f"order {name!r} returned {len(indices)} indices that are no permutation of {len(relevance)} documents; "
            f"it must return each of 0..{len(relevance) - 1} once"
        )
    return indices


@ORDERS.register("relevance")
def relevance(relevance: Sequence[float | None], seed: int) -> tuple[int, ...]:
    """Best document first, worst last."""
    return best_first(relevance)


@ORDERS.register("reverse")
def reverse(relevance: Sequence[float | None], seed: int) -> tuple[int, ...]:
    """Worst document first, best last, next to the question."""
    return best_first(relevance)[::-1]


@ORDERS.register("ends_first")
def ends_first(relevance: Sequence[float | None], seed: int) -> tuple[int, ...]:
    """Best document first, second best last, and so on inwards: ranks 1 3 5 .. 6 4 2, for odd and even numbers."""
    ranked = best_first(relevance)
    return ranked[0::2] + ranked[1::2][::-1]


@ORDERS.register("original")
def original(relevance: Sequence[float | None], seed: int) -> tuple[int, ...]:
    """The order the documents came in."""
    return tuple(range(len(relevance)))


@ORDERS.register("random")
def random(relevance: Sequence[float | None], seed: int) -> tuple[int, ...]:
    """Drawn from ``seed``; the same seed gives the same order in every process and Python version."""
    # Python promises an unchanging sequence for Random.random() only, not for shuffle().
    generator = _random.Random(seed)
    draws = [generator.random() for _ in relevance]
    return tuple(sorted(range(len(draws)), key=draws.__getitem__))
