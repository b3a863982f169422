"""Inter-document attention: passages attend to each other, and each token ranks the passages by their importance."""

from __future__ import annotations

from dataclasses import dataclass

from rag_posfix.attention.pine import ImportanceOrderedAttention
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Capability, ModelShape, Plan, RowPlan


@MITIGATIONS.register("inter_document", aliases=("pine",))
@dataclass(frozen=True)
class InterDocument(Mitigation):
    """Let passages attend to each other in both directions, the most important passages at the nearest positions.

    Passages have no fixed positions. Every head of every layer ranks the passages for each passage by the attention
    that they would get without positions, and then computes attention with the passages in that order. The question
    and each generated token rank the passages in the same way.

    Source: Wang et al. (2024), Eliminating Position Bias of Language Models (PINE), section 3.3,
        https://arxiv.org/abs/2407.01100
    Formula: P prefix tokens, passages D_1..D_N of n_i tokens, S = sum of n_i; q, k before rotation, in each head:
        s(m, n) = softmax_n(q_m k_n / sqrt(d)) over the tokens n of the passages other than m's own;
        Imp(D_i -> D_j) = sum_{m in D_i} sum_{n in D_j} s(m, n) / n_j.
        For the tokens of D_i, D_i itself has the positions [P + S - n_i, P + S), the passage with the largest Imp the
        positions right before it, and so on down to P. D_i sees itself causally, prefix and other passages whole. A
        token t after the passages has the position P + S + its index among them and ranks by Imp(t -> D_j), the most
        important passage ending at P + S.
    Differs from the paper: passages of equal importance are ranked by content, and passages are stored in that order
        in memory, so that the given order has no effect on rounding; importance between passages is summed over tokens
        in float32, where the authors' code rounds it to 16 bits and ties are common. Whole passages are moved with one
        more rotation, instead of a new rotation of all keys for each token.
    Helps: where passages must be compared with each other.
    Hurts: with many passages and large models. No model was trained with one key at different positions for different
        heads.
    Cost: attention among all pairs of tokens of the passages twice, once to rank and once to attend, instead of half
        of the pairs once; no T x T tensor. Each decode step ranks the passages; keys are kept rotated in their
        passages beside the cache, half its size, padded to the longest passage.
        SmolLM2-135M in bfloat16 on CPUs, 20 passages of 150 tokens: 2.2 times the unmodified model's time to the first
        token, 3 times with matrix units, with which the unmodified model is several times faster.
    Limits: models whose rotary encoding is supported and in which every layer has all keys. With at most one passage
        it equals the unmodified model.
    """

    name = "inter_document"
    order_invariant = True
    requires = frozenset({Capability.ROTATION, Capability.FULL_CACHE, Capability.POSITIONS, Capability.SOFTMAX})

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row whose passages are in canonical order (by content) and attend to each other."""
        if layout.n_passages < 2:
            return Plan()
        order = layout.canonical_order()
        return Plan(rows=(RowPlan(passages=order, attend=ImportanceOrderedAttention.over(layout.select(order))),))
