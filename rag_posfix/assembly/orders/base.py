"""What an order is: a pure permutation of indices, made from numbers and hashes, never from documents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from rag_posfix.contracts.method_spec import MethodSpec, parse_method
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import check_parameters
from rag_posfix.registry import Registry

__all__ = ["ORDERS", "Order", "OrderFacts", "arrange", "best_first", "create_order", "permute", "ranks"]


@dataclass(frozen=True, slots=True)
class OrderFacts:
    """All that an order may go by. A new order that needs another fact adds a field with a default.

    Attributes:
        relevance: One score per document. None means that nothing scored it; such documents rank below all scored
            ones, and where no document has a score, the order they came in counts as best first.
        seed: For orders that draw.
        keys: A content hash per document; empty where nobody knows them.
        recent: Content hashes of prompts that were read lately, in their order, the newest first: what their leading
            passages became may still be kept.
        order_free: Whether the method that will read the prompt answers alike for every order.
    """

    relevance: tuple[float | None, ...]
    seed: int = 0
    keys: tuple[str, ...] = ()
    recent: tuple[tuple[str, ...], ...] = ()
    order_free: bool = False


class Order(ABC):
    """An order with its parameters: a small frozen dataclass, registered by name.

    Attributes:
        name: Registry name.
        example: Parameters to try it with where it needs some.
        file_parameters: Parameters that the command line and the settings take from a file: name -> what turns the
            path into values of parameters. The order itself never reads a file.
    """

    name: ClassVar[str]
    example: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    file_parameters: ClassVar[Mapping[str, Callable[[str], Mapping[str, Any]]]] = MappingProxyType({})

    def __post_init__(self) -> None:
        """Check types and ranges of the parameters."""
        check_parameters(self, f"order {self.name!r}")

    @abstractmethod
    def __call__(self, facts: OrderFacts) -> Sequence[int]:
        """Return a permutation: entry ``i`` is the index of the document that stands in position ``i``."""


ORDERS: Registry[type[Order]] = Registry("order")


def best_first(relevance: Sequence[float | None]) -> tuple[int, ...]:
    """Return the indices from the highest score to the lowest; ties keep the order they came in.

    Args:
        relevance: One score per document, None where there is none.
    """
    return tuple(sorted(range(len(relevance)), key=lambda i: _descending(relevance[i])))


def _descending(score: float | None) -> tuple[bool, float]:
    return (True, 0.0) if score is None else (False, -score)


def ranks(relevance: Sequence[float | None]) -> tuple[int, ...]:
    """Return the rank of each document, 0 for the most relevant.

    Args:
        relevance: One score per document, None where there is none.
    """
    rank = [0] * len(relevance)
    for place, index in enumerate(best_first(relevance)):
        rank[index] = place
    return tuple(rank)


def create_order(order: str, defaults: Mapping[str, Mapping[str, Any]] | None = None) -> Order:
    """Return the order that ``order`` asks for.

    Args:
        order: A name in ``ORDERS``, or ``name:parameter=value``; values are JSON where they parse as JSON.
        defaults: Parameters by name of the order, for one that is named without any.

    Raises:
        UnknownNameError: no order has this name.
        ConfigError: an unknown parameter, or a value outside of what is allowed.
    """
    spec = parse_method(order, "order", "slots=[0.4,0.2,0.4]")
    if not spec.parameters:
        spec = MethodSpec(spec.name, (defaults or {}).get(ORDERS.resolve(spec.name), {}))
    made: Order = ORDERS.create(spec)
    return made


def arrange(order: Order, facts: OrderFacts) -> tuple[int, ...]:
    """Return the permutation that an order makes.

    Args:
        order: The order.
        facts: What it goes by.

    Raises:
        ConfigError: the order (one that was added from outside) returned something else than a permutation.
    """
    indices = tuple(order(facts))
    count = len(facts.relevance)
    if sorted(indices) != list(range(count)):
        raise ConfigError(
            f"order {order.name!r} returned {len(indices)} indices that are no permutation of {count} documents; "
            f"it must return each of 0..{count - 1} once"
        )
    return indices


def permute(order: str, relevance: Sequence[float | None], seed: int = 0) -> tuple[int, ...]:
    """Return the permutation that the order called ``order`` makes from scores alone.

    Args:
        order: A name in ``ORDERS``, or ``name:parameter=value``.
        relevance: One score per document, None where there is none.
        seed: For orders that draw; the others ignore it.

    Raises:
        UnknownNameError: no order has this name.
        ConfigError: a parameter is wrong, or the order returned something else than a permutation.
    """
    return arrange(create_order(order), OrderFacts(tuple(relevance), seed))
