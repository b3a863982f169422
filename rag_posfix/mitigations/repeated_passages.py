"""Repeated passages: the prompt holds all passages twice, or the most relevant once more at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import ModelShape, Plan, RowPlan


@MITIGATIONS.register("repeated_passages")
@dataclass(frozen=True)
class RepeatedPassages(Mitigation):
    """Repeat passages in a plain prompt: causal, positions 0, 1, 2, ...

    A baseline. In a causal model a passage cannot attend to those behind it; its copy can. The most relevant passage
    once more at the end is next to the question, where many models read best.

    Source: "Re-Reading" of the question, Xu et al. (2024), https://aclanthology.org/2024.emnlp-main.871, and prompt
        repetition, Leviathan et al. (2025), https://arxiv.org/abs/2512.14982; here for passages.
    Formula: with passages d_1 ... d_n in the order of the prompt: repeat="all" reads d_1 ... d_n d_1 ... d_n;
        repeat="best" reads d_1 ... d_n d_b, where d_b has the highest relevance (of equal ones the first by content).
        One passage alone is not repeated.
    Differs from the paper: the papers repeat the question, or the whole prompt.
    Cost: "all" reads the passages twice, in memory too; "best" reads one passage more.
    Limits: every model. The answer depends on the order of the passages, unless the order of the prompt follows from
        scores and content. Without relevance, "best" repeats the first passage by content.
    Helps: as a baseline that other methods have to beat.
    Hurts: long prompts, which become up to twice as long.

    Args:
        repeat: ``all`` or ``best``.
    """

    name = "repeated_passages"

    repeat: Literal["all", "best"] = "all"

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row with the repeated passages."""
        order = tuple(range(layout.n_passages))
        if len(order) < 2:
            return Plan(rows=(RowPlan(reusable=layout.boundaries),))
        passages = order * 2 if self.repeat == "all" else (*order, layout.ranked()[0])
        return Plan(rows=(RowPlan(passages=passages, reusable=layout.select(passages).boundaries),))
