"""Canonical rotations: rows that each read all passages, with another passage next to the question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rag_posfix.lazy_torch import Tensor
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Integer, Number
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import ModelShape, Plan, RowPlan, RowScores, log_relevance, mixture, per_device


@MITIGATIONS.register("canonical_rotations")
@dataclass(frozen=True)
class CanonicalRotations(Mitigation):
    """Read all passages once per passage, each time another one last, and pool the rows.

    The list is sorted by relevance and content, never by the given order, so the answer does not depend on the given
    order. Every passage is once where the model reads best.

    Source: averaging over permutations, Tang et al. (2024), Found in the Middle: Permutation Self-Consistency, section
        2, https://arxiv.org/abs/2310.07712, with rotations of one canonical list in place of random permutations.
    Formula: row k = the passages in ascending relevance, rotated so that passage k is last; with s_k its log-softmax,
        y the answer so far and r_k the relevance of passage k:
        score(t) = logsumexp_k [log w_k + s_k(t)], w = softmax_k(relevance_weight log r_k + log p_k(y)).
    Differs from the paper: answers are pooled as probabilities, not as rankings; the rows are rotations.
    Cost: N rows of the whole prompt, each read on its own: N times the prefill of the model. Each decode step runs N
        rows. ``rows`` bounds N. Leading passages are taken from the passage KV store where it holds them in this
        order.
    Limits: every model. On a server (``model=openai:...``) the rows answer alone, and the answer that agrees most with
        the others is returned, as in the paper: each row counts by the relevance of its last passage.
    Helps: where a passage has to be read next to others, and the model favours the end.
    Hurts: prefill is N times that of the model.

    Args:
        rows: Rows at most, those with the most relevant passages last; None has one for each passage.
        relevance_weight: Weight of the passages' relevance, 0 to 20.
    """

    name = "canonical_rotations"
    order_invariant = True
    supports_voting = True
    uses_last_prompt_token = True

    rows: Annotated[int | None, Integer(1)] = None
    relevance_weight: Annotated[float, Number(0, 20)] = 1.0

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row for each passage that is to be last."""
        ascending = layout.ranked()[::-1]
        last = layout.ranked()[: self.rows]
        if not last:
            return Plan()
        orders = [(*ascending[position + 1 :], *ascending[: position + 1]) for position in map(ascending.index, last)]
        rows = tuple(RowPlan(passages=order, reusable=layout.select(order).boundaries) for order in orders)
        relevance_on = per_device(self.relevance_weight * log_relevance(layout, last))

        def combine(scores: RowScores) -> tuple[Tensor, Tensor]:
            weights = (relevance_on(scores.log_probs.device) + scores.answer).log_softmax(dim=0)
            return mixture(scores.log_probs, weights), weights.exp()

        return Plan(rows=rows, combine=combine)
