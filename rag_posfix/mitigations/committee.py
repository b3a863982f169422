"""Committee: one expert per passage, and one row that reads all passages in an order of their content."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from rag_posfix.lazy_torch import Tensor, torch
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Integer, Number
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import (
    Combine,
    ModelShape,
    Plan,
    Relevance,
    RowPlan,
    RowScores,
    Rule,
    mixture,
    relevance_rule,
    without_question_copies,
)


@MITIGATIONS.register("committee")
@dataclass(frozen=True)
class Committee(Mitigation):
    """Pool experts that read one passage each with a row that reads all passages, sorted by relevance.

    The order of the all-passages row follows from relevance and content, never from the given order, so the answer
    does not depend on the given order. The all-passages row can combine passages, which no expert can.

    Source: ours. The experts are those of PCED (2026), https://arxiv.org/abs/2601.08670
    Formula: s_k = log-softmax of expert k, s_J that of the all-passages row, s_0 that of the row without passages, r_k
        the relevance of passage k, y the answer so far:
        log w_k = log(1 - prior) + log softmax_k(relevance_weight log r_k), log w_J = log prior;
        score(t) = logsumexp over k and J of [log w' + (1 + contrast) s(t) - contrast s_0(t)], w' = softmax(log w +
        log p(y)) over k and J: the probability of the answer if one of the rows, not known which, is right.
    Differs from the paper: PCED has no all-passages row.
    Cost: N + 2 rows. The experts' passages are encoded once and cached; the all-passages row reads all passages once
        more, after the leading ones that the passage KV store holds in this order. Each decode step runs N + 2 rows.
    Limits: every model. ``experts`` bounds N and the passages of the all-passages row.
    Helps: where the answer needs two passages, and where no single passage stands out.
    Hurts: the first token of a warm question: the all-passages row has to be read for every new order of relevance.

    Args:
        prior: Share of the all-passages row before the first token, 0 (experts alone) to 1 (the all-passages row
            alone), both excluded.
        joint_order: ``best_last`` or ``best_first``: where the all-passages row has the most relevant passage.
        relevance_weight: Weight of the passages' relevance, 0 to 20.
        relevance: What weighs the experts: ``question``, how likely each passage makes the question; ``score``, the
            scores that came with the passages; ``both``, their product. The all-passages row is sorted by the scores.
        contrast: How far to move away from the row without passages, 0 to 2.
        experts: Keep only this many passages, the most relevant; None keeps all.
        question_copies: Whether copies of the question are read and count as evidence for their passages.
    """

    name = "committee"
    order_invariant = True
    uses_last_prompt_token = True

    prior: Annotated[float, Number(1e-6, 1 - 1e-6)] = 0.5
    joint_order: Literal["best_last", "best_first"] = "best_last"
    relevance_weight: Annotated[float, Number(0, 20)] = 5.0
    relevance: Relevance = "both"
    contrast: Annotated[float, Number(0, 2)] = 0.0
    experts: Annotated[int | None, Integer(1)] = None
    question_copies: bool = False

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row per passage, the row without passages, and the all-passages row."""
        cut = None if self.question_copies or self.relevance == "score" else without_question_copies(layout)
        layout = cut.layout if cut else layout
        ranked = layout.ranked()[: self.experts]
        if not ranked:
            return Plan()
        order = ranked if self.joint_order == "best_first" else ranked[::-1]
        experts = [index for index in layout.canonical_order() if index in ranked]
        return Plan(
            rows=(
                *(RowPlan(passages=(index,)) for index in experts),
                RowPlan(passages=()),
                RowPlan(passages=order, reusable=layout.select(order).boundaries, all_passages=True),
            ),
            combine=self._combine(relevance_rule(self.relevance, layout, experts, cut), len(experts)),
            independent_passages=True,
            score_question=self.relevance != "score",
            layout=layout if cut else None,
        )

    def _combine(self, relevance: Rule, n: int) -> Combine:
        """Return the pooling rule."""

        def members(rows: Tensor) -> Tensor:
            """Return the experts and the all-passages row, without the row without passages."""
            return torch.cat((rows[:n], rows[n + 1 :]))

        def combine(scores: RowScores) -> tuple[Tensor, Tensor]:
            experts = self.relevance_weight * relevance(scores.question[:n])
            prior = experts.log_softmax(dim=0) + math.log1p(-self.prior)
            prior = torch.cat((prior, torch.full_like(prior[:1], math.log(self.prior))))
            weights = (prior + members(scores.answer)).log_softmax(dim=0)  # (N + 1,)
            log_probs = (1 + self.contrast) * members(scores.log_probs) - self.contrast * scores.log_probs[n]
            share = weights.exp()
            return mixture(log_probs, weights), torch.cat((share[:n], share.new_zeros(1), share[n:]))

        return combine
