"""The baseline: the model as it was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.model_shape import ModelShape
from rag_posfix.plan.plan import Plan, RowPlan

__all__ = ["Unmodified"]


@MITIGATIONS.register("none")
@dataclass(frozen=True)
class Unmodified(Mitigation):
    """Change nothing: one row, causal, positions 0, 1, 2, ...

    Every comparison runs it through the same engine, prompt, dtype and decoding as the method it is compared with.

    Source: none.
    Formula: none.
    Differs from the paper: nothing to differ from.
    Cost: that of the model.
    Limits: every model; the answer depends on the order of the passages.
    Helps: to tell what a correction is worth: all others are compared with it. And to answer, where the model reads
        its context evenly (measure that first), or where a reranker puts the right passage at the place that the
        model favours: at its best place it beats context_experts on Lost in the Middle (docs/results.md).
    Hurts: when the right passage stands elsewhere. SmolLM2-135M changes its answer with the place of the right
        passage in 17 of 20 Lost-in-the-Middle questions; Llama-2-70b-chat is right in 69 % of them with the right one
        of 20 passages last, and in 53 % with it fifth (Liu et al., 2023).
    """

    name: ClassVar[str] = "none"
    paper: ClassVar[str] = ""

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return the plan that changes nothing."""
        return Plan(rows=(RowPlan(reusable=layout.boundaries),))
