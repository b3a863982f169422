"""Inter-document attention (PINE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_posfix.attention.inter_document import ByImportance
from rag_posfix.attention.plan import Plan, RowPlan
from rag_posfix.attention.shape import Capability, ModelShape
from rag_posfix.attention.spans import Layout
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation

__all__ = ["InterDocument"]


@MITIGATIONS.register("inter_document")
@dataclass(frozen=True)
class InterDocument(Mitigation):
    """x.

    Source: x
    Formula: x
    Differs from the paper: x
    Cost: x
    Limits: x
    """

    name: ClassVar[str] = "inter_document"
    paper: ClassVar[str] = (
        "Wang et al. (2024), Eliminating Position Bias of Language Models: A Mechanistic Approach, "
        "https://arxiv.org/abs/2407.01100"
    )
    order_invariant: ClassVar[bool] = True
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.ROTATION, Capability.FULL_CACHE, Capability.POSITIONS}
    )

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row."""
        if layout.n_passages < 2:
            return Plan()
        order = layout.canonical_order()
        return Plan(rows=(RowPlan(passages=order, attend=ByImportance.over(layout.select(order))),))
