"""Orders to put passages in."""

from __future__ import annotations

import math
import random

from rag_posfix.errors import EvaluationError

__all__ = ["drawn_orders"]


def drawn_orders(count: int, n_orders: int, seed: int, name: str) -> list[tuple[int, ...]]:
    """Return distinct orders of ``count`` passages: the given one, then others drawn at random.

    Args:
        count: Passages.
        n_orders: How many orders, the given one included.
        seed: Draws them.
        name: What is ordered; another name draws other orders.

    Raises:
        EvaluationError: there are not so many orders.
    """
    possible = math.factorial(count)
    if not 2 <= n_orders <= possible:
        raise EvaluationError(
            f"orders={n_orders} must be between 2 and {possible}, the number of orders of {count} passages"
        )
    draw = random.Random(f"{seed}:{name}")
    orders = {tuple(range(count)): None}
    while len(orders) < n_orders:
        orders[tuple(draw.sample(range(count), count))] = None
    return list(orders)
