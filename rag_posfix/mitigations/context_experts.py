"""Context experts: each expert reads one passage alone, and the next-token distributions are combined."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from rag_posfix.errors import ConfigError
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


def jensen_shannon(left: Tensor, right: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence in bits: 0 for equal distributions, 1 for ones without a common token.

    Formula: JSD(p, q) = (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2, logarithms to base 2.
    Source: Lin (1991), Divergence Measures Based on the Shannon Entropy, https://doi.org/10.1109/18.61115

    Shapes:
        left, right: (..., V) log-probabilities, float32; they broadcast.
        returns: (...).
    """
    middle = torch.logaddexp(left, right) - math.log(2)
    nats = (_divergence(left, middle) + _divergence(right, middle)) / 2
    return (nats / math.log(2)).clamp(0.0, 1.0)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) in nats; tokens with p = 0 contribute 0."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=-1)


DIVERGENCE = "divergence"


@MITIGATIONS.register(
    "context_experts",
    aliases=("pced",),
    presets={
        "default": {"contrast": 0.3, "relevance": "both"},
        "auto": {"contrast": 0.3, "relevance": "both"},  # without a measured profile
    },
)
@dataclass(frozen=True)
class ContextExperts(Mitigation):
    """Read the question once per passage and once without any, and combine the next-token distributions of these rows.

    Each row (expert) holds one passage, so passages have no order, and the answer cannot depend on it. The name
    ``default``, which is used where no method is named, stands for ``context_experts:contrast=0.3:relevance=both``.

    Source: PCED, Parallel Context-of-Experts Decoding (2026), https://arxiv.org/abs/2601.08670
    Formula: s_k = log-softmax of expert k, s_0 that of the row without passages, r_k the passage's relevance:
        pool="max" (the paper): score(t) = max_k [(1 + contrast) s_k(t) - contrast s_0(t) + relevance_weight log r_k]
        pool="mixture": score(t) = logsumexp_k [log w_k + (1 + contrast) s_k(t) - contrast s_0(t)],
            w = softmax_k(relevance_weight log r_k + answer_weight * sum of expert k's log-probabilities of the answer
            so far).
        Both are normalised over the vocabulary. With answer_weight=1 and contrast=0 the mixture is exactly the
        answer's probability under "one passage has the answer, which one is unknown": sum_k w_k p(answer | passage k),
        where w is the passage's weight before the answer.
        plausible=alpha > 0: the contrast raises no token with p_k(t) < alpha max_t p_k(t) (adaptive plausibility, Li
            et al. 2023, https://arxiv.org/abs/2210.15097, excludes these tokens; here they keep at most s_k(t)).
        Words of a passage that copy the question are not read, and its score stays (``plan.pooling``), unless
            relevance="score".
        contrast="divergence": the contrast of expert k at this token is JSD(p_k, p_0), the Jensen-Shannon divergence
        in bits between the distributions of the expert and of the row without passages, 0 (equal) to 1 (disjoint).
    Differs from the paper: experts are pooled as a mixture whose weights follow the answer so far (``answer_weight``),
        because a change of the expert at every token generates broken text; without it, contrast does so too;
        relevance is the likelihood of the question after the passage, from the same forward pass, because it finds the
        gold passage more often than small embeddings do. ``pool="max", answer_weight=0, relevance="score",
        contrast=...`` is the paper's rule. Contrast is 0 by default.
    Cost: N + 1 rows of prefix + passage + question; the passages are encoded once, in one batch. Each decode step
        runs N + 1 rows. ``experts`` limits N.
    Limits: every model, including those with sliding windows. Facts of two passages cannot be combined in an answer.
    Helps: where one passage answers and names its subject, as in the shipped corpus and XQuAD (docs/results.md). With
        many passages: no row is longer than one passage. With models whose sliding windows exclude other methods.
    Hurts: where the answer needs several passages, since no row sees two. Where many passages are about the subject of
        the question: a distractor is read as confidently as the gold passage (docs/results.md has the numbers on Lost
        in the Middle). In decoding: every step reads N + 1 caches.

    Args:
        contrast: Distance from the model without passages: a number from 0 to 2, the same for every expert and token,
            or ``divergence``, the divergence of the expert from that model at this token.
        relevance_weight: Weight of the passages' relevance, 0 to 20. A public implementation of the paper uses 2.5.
        relevance: ``question`` is the likelihood of the question after each passage, exp of the mean log-probability
            of its tokens; ``score`` is the one that came with the passage, at least 0.01 (without scores all are
            equal); ``both`` multiplies them.
        pool: ``mixture`` or ``max``.
        answer_weight: How much the weight of an expert grows with its likelihood of the answer so far, 0 (the expert
            may change at every token) to 1 (the exact posterior). Mixture only.
        experts: Use only this many passages, the most relevant; None uses all.
        contrast_until: ``sentence`` ends the contrast with the first sentence of the answer, ``answer`` never.
        plausible: Share of an expert's highest probability below which the contrast raises no token, 0 (every token
            may rise) to 1.
        question_copies: Whether copies of the question are read and count as evidence for their passages.
    """

    name = "context_experts"
    order_invariant = True
    uses_last_prompt_token = True  # tokens of the answer change the experts' weights, tokens of the prompt do not

    contrast: Annotated[float | Literal["divergence"], Number(0, 2)] = 0.0
    relevance_weight: Annotated[float, Number(0, 20)] = 5.0
    relevance: Relevance = "question"
    pool: Literal["mixture", "max"] = "mixture"
    answer_weight: Annotated[float, Number(0, 1)] = 1.0
    experts: Annotated[int | None, Integer(1)] = None
    contrast_until: Literal["sentence", "answer"] = "answer"
    question_copies: bool = False
    plausible: Annotated[float, Number(0, 1)] = 0.0

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row per passage in canonical order (by content), then the row without passages."""
        cut = None if self.question_copies or self.relevance == "score" else without_question_copies(layout)
        layout = cut.layout if cut else layout
        chosen = self._chosen(layout)
        if not chosen:
            return Plan()
        rows = (*(RowPlan(passages=(index,)) for index in chosen), RowPlan(passages=()))
        return Plan(
            rows=rows,
            combine=self._combine(relevance_rule(self.relevance, layout, chosen, cut)),
            independent_passages=True,
            score_question=self.relevance != "score",
            layout=layout if cut else None,
            tracks_sentence=bool(self.contrast) and self.contrast_until == "sentence",
        )

    def _chosen(self, layout: Layout) -> tuple[int, ...]:
        """Return the passages that get an expert, in canonical order."""
        order = layout.canonical_order()
        if self.experts is None or self.experts >= len(order):
            return order
        if layout.relevance is None:
            raise ConfigError(
                f"context_experts: experts={self.experts} keeps the most relevant of {len(order)} passages, but they "
                "carry no relevance; rerank them first or leave experts out"
            )
        relevance = layout.relevance
        best = sorted(order, key=lambda i: -relevance[i])[: self.experts]  # stable: ties stay in canonical order
        return tuple(i for i in order if i in best)

    def _combine(self, relevance: Rule) -> Combine:
        """Return the pooling rule."""

        def combine(scores: RowScores) -> tuple[Tensor, Tensor]:
            experts, no_context = scores.log_probs[:-1], scores.log_probs[-1]  # (N, V), (V,)
            weights = self.relevance_weight * relevance(scores.question[:-1])  # (N,)
            if self.contrast and (scores.first_sentence or self.contrast_until == "answer"):
                contrast: Tensor | float = (
                    jensen_shannon(experts, no_context)[:, None] if isinstance(self.contrast, str) else self.contrast
                )
                contrasted = (1 + contrast) * experts - contrast * no_context
                if self.plausible:
                    is_plausible = experts >= experts.amax(dim=-1, keepdim=True) + math.log(self.plausible)
                    contrasted = torch.where(is_plausible, contrasted, torch.minimum(experts, contrasted))
                experts = contrasted
            if self.pool == "max":
                pooled, selected_row = (experts + weights[:, None]).max(dim=0)
                share = torch.zeros(len(weights) + 1, device=pooled.device)
                share[selected_row[pooled.argmax()]] = 1.0
                pooled = pooled - pooled.logsumexp(dim=0)
            else:
                weights = (weights + self.answer_weight * scores.answer[:-1]).log_softmax(dim=0)
                pooled = mixture(experts, weights)
                share = torch.cat((weights.exp(), weights.new_zeros(1)))
            return pooled, share

        return combine
