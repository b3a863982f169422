"""What an order is: a pure function from scores and content hashes to a permutation. It sees no documents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from rag_posfix.contracts.method_spec import MethodSpec, named_method, parse_method
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import check_parameters
from rag_posfix.registry import Registry


@dataclass(frozen=True, slots=True)
class OrderInputs:
    """The input of an order. An order that needs more input adds a field with a default.

    Attributes:
        relevance: One score per document, or None for a document without a score. Such documents rank below all
            others; if no document has a score, the given order counts as best first.
        seed: For random orders.
        keys: A content hash per document; empty if they are not known.
        recent: Content hashes of the passages of recent prompts, in prompt order, the newest prompt first. The keys
            and values of their leading passages may still be cached.
        order_free: Whether the answer of the method that reads the prompt does not depend on the order.
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
        example: Parameters for tests, if the order has parameters without a default.
        by_content: Whether the permutation follows from scores and content alone, so that it does not depend on the
            order in which scored documents were given.
        reads_recent: Whether the permutation depends on recent prompts.
        file_parameters: Parameters that the command line and the settings read from a file: name -> function that
            turns the path into values of parameters. The order itself never reads a file.
    """

    name: ClassVar[str]
    example: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    by_content: ClassVar[bool] = False
    reads_recent: ClassVar[bool] = False
    file_parameters: ClassVar[Mapping[str, Callable[[str], Mapping[str, Any]]]] = MappingProxyType({})

    def __post_init__(self) -> None:
        """Check types and ranges of the parameters."""
        check_parameters(self, f"order {self.name!r}")

    @abstractmethod
    def __call__(self, inputs: OrderInputs) -> Sequence[int]:
        """Return a permutation: entry ``i`` is the index of the document at position ``i``."""


ORDERS: Registry[type[Order]] = Registry("order", parse=named_method)


def best_first(relevance: Sequence[float | None], keys: Sequence[str] = ()) -> tuple[int, ...]:
    """Return the indices from the highest score to the lowest.

    Equal scores are ordered by content hash, so that the order does not depend on the order in which the documents
    were given. If no document has a score, or the hashes are not known, they keep the given order.

    Args:
        relevance: One score per document, or None.
        keys: One content hash per document, or none at all.
    """
    by_content = len(keys) == len(relevance) and any(score is not None for score in relevance)
    return tuple(
        sorted(range(len(relevance)), key=lambda i: (*_descending(relevance[i]), keys[i] if by_content else ""))
    )


def _descending(score: float | None) -> tuple[bool, float]:
    return (True, 0.0) if score is None else (False, -score)


def ranks(relevance: Sequence[float | None], keys: Sequence[str] = ()) -> tuple[int, ...]:
    """Return the rank of each document, 0 for the most relevant."""
    rank = [0] * len(relevance)
    for position, index in enumerate(best_first(relevance, keys)):
        rank[index] = position
    return tuple(rank)


def create_order(order: str, defaults: Mapping[str, Mapping[str, Any]] | None = None) -> Order:
    """Return an order by name.

    Args:
        order: A name in ``ORDERS``, or ``name:parameter=value``; values are JSON where they parse as JSON.
        defaults: Parameters by name of the order, used if ``order`` gives none.

    Raises:
        UnknownNameError: no order has this name.
        ConfigError: an unknown parameter, or a value outside of its range.
    """
    spec = parse_method(order, "order", "slots=[0.4,0.2,0.4]")
    if not spec.parameters:
        spec = MethodSpec(spec.name, (defaults or {}).get(ORDERS.resolve(spec.name), {}))
    instance: Order = ORDERS.create(spec)
    return instance


def apply_order(order: Order, inputs: OrderInputs) -> tuple[int, ...]:
    """Return the permutation of an order, after checking that it is one.

    Raises:
        ConfigError: the order did not return a permutation.
    """
    indices = tuple(order(inputs))
    count = len(inputs.relevance)
    if sorted(indices) != list(range(count)):
        raise ConfigError(
            f"order {order.name!r} returned {len(indices)} indices that are no permutation of {count} documents; "
            f"it must return each of 0..{count - 1} once"
        )
    return indices


def permute(order: str, relevance: Sequence[float | None], seed: int = 0) -> tuple[int, ...]:
    """Return the permutation of an order for given scores.

    Raises:
        UnknownNameError: no order has this name.
        ConfigError: a parameter is wrong, or the order did not return a permutation.
    """
    return apply_order(create_order(order), OrderInputs(tuple(relevance), seed))
