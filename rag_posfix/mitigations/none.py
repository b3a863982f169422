"""The baseline: the model as it was trained."""

from __future__ import annotations

from dataclasses import dataclass

from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import ModelShape, Plan, RowPlan


@MITIGATIONS.register("none")
@dataclass(frozen=True)
class Unmodified(Mitigation):
    """Change nothing: one row, causal, positions 0, 1, 2, ...

    Every comparison runs the baseline with the same engine, prompt, dtype and decoding as the other methods.

    Source: none.
    Formula: none.
    Differs from the paper: no paper.
    Cost: that of the model.
    Limits: every model; the answer depends on the order of the passages.
    Helps: as the baseline that methods are compared with. As a method, where the model reads its context evenly
        (measure that first), or where a reranker puts the gold passage at the model's best position: there it is
        better than context_experts on Lost in the Middle (docs/results.md).
    Hurts: when the gold passage is at another position (docs/results.md).
    """

    name = "none"

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return the plan that changes nothing."""
        return Plan(rows=(RowPlan(reusable=layout.boundaries),))
