"""The baseline: the model as it was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_posfix.attention.plan import Plan
from rag_posfix.attention.shape import ModelShape
from rag_posfix.attention.spans import Layout
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation

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
    """

    name: ClassVar[str] = "none"
    paper: ClassVar[str] = ""

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return the plan that changes nothing."""
        return Plan()
