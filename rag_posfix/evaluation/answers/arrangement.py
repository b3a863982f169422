"""Arrangements: reranker, order and method together, as a user runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rag_posfix.assembly.orders import ORDERS, create_order
from rag_posfix.contracts.method_spec import GIVEN_ORDER, MethodSpec, parse_method, read_arrangement
from rag_posfix.errors import ConfigError
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.reranking import RERANKERS

__all__ = ["OWN_SCORER", "Arrangement", "check_arrangements", "parse_arrangement"]

OWN_SCORER = ""
"""Label of the experiment's own scorer, for arrangements that name none."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What is done with the passages of a question.

    Attributes:
        mitigation: The method that reads the prompt.
        order: The order of the passages in the prompt; ``original`` leaves them as the experiment puts them.
        reranker: What scores the passages; None is the experiment's own scorer. ``top_n`` keeps the best few.
    """

    mitigation: MethodSpec
    order: str = GIVEN_ORDER
    reranker: MethodSpec | None = None

    @property
    def scorer(self) -> str:
        """Label of what scores the passages; empty for the experiment's own scorer."""
        return OWN_SCORER if self.reranker is None else self.reranker.label

    @property
    def label(self) -> str:
        """Text that ``parse_arrangement`` reads back; that of the method where nothing else is said."""
        if self.reranker is None and self.order == GIVEN_ORDER:
            return self.mitigation.label
        scorer = "" if self.reranker is None else _reranker_label(self.reranker)
        return f"{scorer}/{self.order}/{self.mitigation.label}"

    @property
    def order_free(self) -> bool:
        """Whether the answer does not depend on the order in which the passages were given.

        Either the method does not depend on the order, or the order in the prompt follows from scores and content.
        Scores do not depend on the given order where a reranker reads all passages (``window``).
        """
        if create(self.mitigation.name, self.mitigation.parameters).is_order_invariant:
            return True
        return ORDERS.get(parse_method(self.order, "order", "slots=[0.4,0.2,0.4]").name).by_content


def parse_arrangement(text: str) -> Arrangement:
    """Read ``reranker/order/method``, each ``name`` or ``name:parameter=value``; a method alone is the rest as given.

    An empty reranker is the experiment's own scorer, an empty order ``original``. ``likelihood+embedding`` fuses.
    Nothing is looked up, and no file is read.

    Raises:
        ConfigError: two parts or more than three, or a part that cannot be read.
    """
    reranker, order, mitigation = read_arrangement(text)
    return Arrangement(mitigation, order, reranker)


def check_arrangements(arrangements: Sequence[Arrangement]) -> None:
    """Check names and parameters before a model is loaded.

    Raises:
        ConfigError: an unknown name or parameter, a value outside of what is allowed, or an arrangement twice.
    """
    for index, arrangement in enumerate(arrangements):
        MITIGATIONS.check(arrangement.mitigation)
        create_order(arrangement.order)
        if arrangement.reranker is not None:
            RERANKERS.check(arrangement.reranker)
        if arrangement in arrangements[:index]:
            raise ConfigError(f"{arrangement.label!r} occurs twice with the same parameters; remove one of them")


def _reranker_label(spec: MethodSpec) -> str:
    scorers = spec.parameters.get("scorers")
    if spec.name != "fused" or not isinstance(scorers, list) or not all(isinstance(one, str) for one in scorers):
        return spec.label
    rest = {name: value for name, value in spec.parameters.items() if name != "scorers"}
    return MethodSpec("+".join(scorers), rest).label
