"""Inter-document attention: passages read each other, each arranging the others by how much they matter to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag_posfix.attention.pine import ByImportance
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.model_shape import Capability, ModelShape
from rag_posfix.plan.plan import Plan, RowPlan

__all__ = ["InterDocument"]


@MITIGATIONS.register("inter_document", aliases=("pine",))
@dataclass(frozen=True)
class InterDocument(Mitigation):
    """Let passages see each other both ways; each token finds the passages that matter most to it nearest.

    A passage has no place of its own. To the tokens of one passage it stands close, to those of another far away:
    every head of every layer ranks the passages by how much attention they would get if positions did not exist, and
    then attends as if they stood in that order. The question and each generated token rank them anew.

    Source: Wang et al. (2024), Eliminating Position Bias of Language Models (PINE), section 3.3,
        https://arxiv.org/abs/2407.01100
    Formula: P prefix tokens, passages D_1..D_N of n_i tokens, S = sum of n_i; q, k before rotation, in each head:
        s(m, n) = softmax_n(q_m k_n / sqrt(d)) over the tokens n of the passages other than m's own;
        Imp(D_i -> D_j) = sum_{m in D_i} sum_{n in D_j} s(m, n) / n_j.
        To D_i itself stands in [P + S - n_i, P + S), the passage with the largest Imp right before it, and so on
        towards P. D_i sees itself causally, prefix and other passages whole. A token t after the passages stands at
        P + S + its index among them and ranks by Imp(t -> D_j), the most important passage ending at P + S.
    Differs from the paper: passages that are equally important are ranked in an order given by their content, and
        they stand in memory in that order, so that the caller's order never reaches the arithmetic; importance is
        summed in float32, where the authors' code rounds it to 16 bits and ties are common. Positions are applied
        by moving whole passages with one more rotation instead of rotating all keys again for each token.
    Helps: where the passages must be weighed against each other: reasoning pairs of RewardBench, Llama-3-8B 65.3 to
        73.4, 70B 78.9 to 87.6 (the paper); Lost in the Middle with 10 / 20 / 30 passages, Llama-3.1-8B 58.6-59.0 /
        55.5-56.2 / 53.7-54.8 over gold positions against 50.2-54.7 / 51.0-54.8 / 43.5-56.8 unmodified (RoToR,
        https://arxiv.org/abs/2502.08662).
    Hurts: with many passages and large models: Lost in the Middle with 20 passages, Llama-3-70B 2.0 points below the
        unmodified average (+1.2 with 10); all of RewardBench, Qwen1.5-72B 1.1 below (the paper). A model was never
        trained to see one key at different places from different heads.
    Cost: attention among all pairs of tokens of the passages twice, once to rank and once to attend, instead of half
        of the pairs once; no T x T tensor. Each decode step ranks and rotates all cached keys anew. SmolLM2-135M in
        bfloat16 on a CPU, 20 passages of 150 tokens: 1.8 times the unmodified model's time to the first token.
    Limits: models whose rotation the library can do itself and whose every layer keeps all keys. With one passage or
        none it is the unmodified model.
    """

    name: ClassVar[str] = "inter_document"
    paper: ClassVar[str] = (
        "Wang et al. (2024), Eliminating Position Bias of Language Models: A Mechanistic Approach, "
        "https://arxiv.org/abs/2407.01100"
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "Equally important passages are ranked in an order given by their content.",
        "Importance is summed in float32.",
        "Passages are laid in memory in a content-given order.",
    )
    order_invariant: ClassVar[bool] = True
    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.ROTATION, Capability.FULL_CACHE, Capability.POSITIONS}
    )

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row whose passages stand in a content-given order and attend to each other."""
        if layout.n_passages < 2:
            return Plan()
        order = layout.canonical_order()
        return Plan(rows=(RowPlan(passages=order, attend=ByImportance.over(layout.select(order))),))
