"""Set-based prompting: passages are a set without order; they share their start and do not attend to each other."""

from __future__ import annotations

from dataclasses import dataclass

from rag_posfix.attention.masks import window_positions, windows_mask, windows_of
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Capability, ModelShape, Plan, RowPlan


@MITIGATIONS.register("set_prompting", aliases=("set_based_prompting",))
@dataclass(frozen=True)
class SetPrompting(Mitigation):
    """Start every passage at the same position and hide the passages from each other, as in a set.

    Positions and attention contain no information about the order of the passages. The method computes the same as
    ``parallel_windows`` with one passage per window; the paper proves the invariance.

    Source: McIlroy-Young et al. (2024), Order-Independence Without Fine Tuning, section 3,
        https://arxiv.org/abs/2406.06581
    Formula: position of token t of any passage = P + t; of the suffix = P + max(n_i) + t; a passage attends to the
        prefix and, causally, to itself, the suffix to everything.
    Differs from the paper: passages are stored in canonical order (by content), so that rounding does not depend on
        the given order either; the sets are the passages, and the text needs no markers.
    Helps: multiple choice with few short options, where the order of the options is the only bias to remove.
    Hurts: generated answers over passages, the more the longer.
    Cost: attention of each passage over itself and the prefix only: less than the unmodified model.
    Limits: models in which every layer has all keys and whose positions can be set.
    """

    name = "set_prompting"
    order_invariant = True
    requires = frozenset({Capability.POSITIONS, Capability.FULL_CACHE})

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row whose passages share their start and do not attend to each other."""
        order = layout.canonical_order()
        row = layout.select(order)
        windows = windows_of(row, None)
        return Plan(
            rows=(RowPlan(passages=order, positions=window_positions(row, windows), mask=windows_mask(row, windows)),),
            independent_passages=True,
        )
