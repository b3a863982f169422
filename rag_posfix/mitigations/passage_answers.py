"""Passage answers: each passage generates a short answer alone, and the answers are compared before one is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rag_posfix.lazy_torch import Tensor, torch
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Integer, Number
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import (
    CandidateAnswers,
    Choose,
    Draft,
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


@MITIGATIONS.register("passage_answers")
@dataclass(frozen=True)
class PassageAnswers(Mitigation):
    """Generate a short answer from each passage alone, and choose the passage whose answer is most specific to it.

    Each row holds one passage, so passages have no order, and the answer cannot depend on it. Whole answers are
    compared instead of next tokens. An answer that the model would also give without the passage, or with another one,
    is no evidence for the passage.

    Source: ours. The rows are those of PCED (2026), https://arxiv.org/abs/2601.08670
    Formula: a_k = greedy short answer of passage k read alone, p_0 = the row without passages, r_k = relevance:
        share_k = p_k(a_k) / sum_j p_j(a_k), over all passages j and the row without any: how specific the answer is to
        passage k;
        w_k = r_k^relevance_weight share_k^share_weight, scaled to sum to 1; equal answers add their weights.
        pool="chosen": of the answer with the largest weight, the passage with the largest w_k answers alone.
        pool="mixture": p(t | answer so far y) = sum_k w'_k p_k(t | y), w'_k = w_k p_k(y), scaled to sum to 1: exactly
        the answer's probability under "passage k has the answer with probability w_k".
    Differs from the paper: this method is not published; PCED pools next tokens and never compares whole answers.
    Cost: N + 1 rows of prefix + passage + question, the passages encoded once; then up to ``answer_tokens`` steps of
        all rows, and one pass of all rows over each distinct short answer: (N + 1)^2 times its length in tokens,
        which for many passages is more than the prefill. Each decode step runs one row with ``pool="chosen"``, the
        rows of all N passages with ``mixture``.
    Limits: every model, including those with sliding windows. Facts of two passages cannot be combined in an answer.
        The short answers are greedy with any sampling.
    Helps: where one passage has the answer and others are about the same subject: the model would give the answers of
        the others anyway, so they get a low weight. With models whose sliding windows exclude other methods, and with
        many passages: no row is longer than one passage.
    Hurts: where the answer needs several passages, since no row sees two. Where the time to first token matters: all
        short answers are generated and compared before it. Where a distractor names something that no other passage
        names: its answer is as specific as the correct one. With ``pool="chosen"`` the gold passage is then lost;
        the mixture gives its answer a higher probability.

    Args:
        relevance: ``question`` is the likelihood of the question after each passage, exp of the mean log-probability
            of its tokens; ``score`` is the one that came with the passage, at least 0.01 (without scores all are
            equal); ``both`` multiplies them.
        relevance_weight: Weight of the relevance, 0 to 20.
        share_weight: Weight of the share, 0 to 5.
        answer_tokens: Maximum number of tokens of a short answer, which also ends after its first line.
        pool: ``chosen`` answers from one passage; ``mixture`` from all, weighted.
        question_copies: Whether copies of the question are read and count as evidence for their passages.
    """

    name = "passage_answers"
    order_invariant = True
    uses_last_prompt_token = True

    relevance: Relevance = "both"
    relevance_weight: Annotated[float, Number(0, 20)] = 2.5
    share_weight: Annotated[float, Number(0, 5)] = 1.0
    answer_tokens: Annotated[int, Integer(1)] = 24
    pool: Literal["chosen", "mixture"] = "chosen"
    question_copies: bool = False

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row per passage in canonical order (by content), then the row without passages."""
        cut = None if self.question_copies or self.relevance == "score" else without_question_copies(layout)
        layout = cut.layout if cut else layout
        order = layout.canonical_order()
        if not order:
            return Plan()
        return Plan(
            rows=(*(RowPlan(passages=(index,)) for index in order), RowPlan(passages=())),
            combine=_posterior,
            independent_passages=True,
            score_question=self.relevance != "score",
            layout=layout if cut else None,
            draft=Draft(self.answer_tokens, self._choose(relevance_rule(self.relevance, layout, order, cut))),
        )

    def _choose(self, relevance: Rule) -> Choose:
        """Return the rule that weighs the rows."""

        def choose(candidates: CandidateAnswers) -> Tensor:
            log_probs = candidates.log_probs[:-1]  # (N, N + 1), of the passages' answers
            share = log_probs.diagonal() - log_probs.logsumexp(dim=1)
            scores = self.relevance_weight * relevance(candidates.question[:-1]) + self.share_weight * share  # (N,)
            silent = [not tokens for tokens in candidates.tokens[:-1]]
            if any(silent) and not all(silent):  # an empty answer counts as none
                scores = scores.masked_fill(torch.tensor(silent, device=log_probs.device), float("-inf"))
            weights = scores.softmax(dim=0)
            if self.pool == "chosen":  # indices stay on the device: reading them would wait for it
                answer_weights = (candidates.same[:-1, :-1] * weights).sum(dim=1)
                best = candidates.same.index_select(0, answer_weights.argmax(dim=0, keepdim=True))[0, :-1]
                selected_row = weights.masked_fill(~best, -1.0).argmax(dim=0, keepdim=True)
                weights = torch.zeros_like(weights).index_fill(0, selected_row, 1.0)
            return torch.cat((weights, weights.new_zeros(1)))

        return choose


def _posterior(scores: RowScores) -> tuple[Tensor, Tensor]:
    """Mix the rows, each weighted by its initial weight and its likelihood of the answer so far."""
    initial = torch.ones_like(scores.answer) if scores.weights is None else scores.weights
    weights = (initial.log() + scores.answer).log_softmax(dim=0)  # (R,)
    return mixture(scores.log_probs, weights), weights.exp()
