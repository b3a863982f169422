"""Orders of the passages in the prompt: one idea per file, each registers itself."""

from rag_posfix.assembly.orders import by_relevance, cache_aware, profile
from rag_posfix.assembly.orders.base import (
    ORDERS,
    Order,
    OrderInputs,
    apply_order,
    best_first,
    create_order,
    permute,
    ranks,
)

__all__ = [
    "ORDERS",
    "Order",
    "OrderInputs",
    "apply_order",
    "best_first",
    "by_relevance",
    "cache_aware",
    "create_order",
    "permute",
    "profile",
    "ranks",
]
