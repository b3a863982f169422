"""What every adapter does with documents: check them, keep the best, put them in order. Knows no framework."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.documents import Document

from rag_posfix.assembly.documents import rank, read_document, unique
from rag_posfix.assembly.orders import OrderFacts, arrange, create_order
from rag_posfix.errors import ConfigError

__all__ = ["arranged", "checked_count", "checked_order"]


def arranged(
    documents: Sequence[Document], order: str, *, k: int | None = None, seed: int = 0, distinct: bool = True
) -> list[Document]:
    """Return the ``k`` best documents in the order called ``order``.

    The best are those with the highest ``metadata["relevance_score"]``; where none has one, the first. The documents
    themselves are returned, not copies.

    Args:
        documents: The documents, in any order.
        order: A name in ``ORDERS``, or ``name:parameter=value``.
        k: How many to return, all if None.
        seed: For orders that draw.
        distinct: Whether documents without text are left out, and all but the best of those with the same text.

    Raises:
        ConfigError: the order, or a document (no Document, no text, a score that is no finite number) is at fault.
    """
    made = create_order(order)
    candidates = [read_document(document, index) for index, document in enumerate(documents)]
    if distinct:
        candidates = list(unique(candidates)[0])
    kept = [candidates[index] for index in sorted(rank(candidates)[:k])]
    facts = OrderFacts(tuple(one.relevance for one in kept), seed, tuple(one.key for one in kept))
    return [kept[index].document for index in arrange(made, facts)]


def checked_count(name: str, count: object, *, optional: bool = True) -> None:
    """Refuse a number of documents below 1.

    Args:
        name: What it is called, for the message.
        count: The number.
        optional: Whether None is allowed.

    Raises:
        ConfigError: it is no integer >= 1.
    """
    if count is None and optional:
        return
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name}={count!r} must be an integer >= 1{', or None for all' if optional else ''}")


def checked_order(order: str) -> str:
    """Return ``order`` if there is such an order with such parameters.

    Args:
        order: A name in ``ORDERS``, or ``name:parameter=value``.

    Raises:
        ConfigError: there is none.
    """
    create_order(order)
    return order
