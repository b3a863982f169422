"""Multi base: the prompt is read with several RoPE bases, and the rows are weighted by confidence at each token."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from rag_posfix.lazy_torch import Tensor
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import NumberList
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Capability, ModelShape, Plan, RowPlan, RowScores


def weigh_by_confidence(scores: RowScores) -> tuple[Tensor, Tensor]:
    """Combine rows, weighted by the probability of each row's likeliest token. A ``Combine`` of ``plan.plan``.

    Formula: w_j = max_v p_j(v) / sum_k max_v p_k(v); p(v) = sum_j w_j p_j(v).
    """
    log_weights = scores.log_probs.amax(dim=-1).log_softmax(dim=0)  # (R,)
    return (scores.log_probs + log_weights[:, None]).logsumexp(dim=0), log_weights.exp()


@MITIGATIONS.register("multi_base", aliases=("attention_buckets",))
@dataclass(frozen=True)
class MultiBase(Mitigation):
    """Read the prompt with several RoPE bases at once, and weight the rows by their confidence at every token.

    With one base, the attention between similar tokens rises and falls with their distance as a wave, and a passage at
    a minimum of the wave is read badly. Other bases have their minima at other distances, so each row reads other
    passages well.

    Source: Chen et al. (2023), Fortify the Shortest Stave in Attention (Attention Buckets),
        https://arxiv.org/abs/2312.04455
    Formula: row j reads the prompt with its RoPE base multiplied by f_j and has the distribution p_j of the next
        token; w_j = max_v p_j(v) / sum_k max_v p_k(v); p = sum_j w_j p_j, at every token.
    Differs from the paper: the paper weights the rows' distributions by the confidence of their predictions, while its
        code takes the softmax of the rows' highest raw logits as weights of their raw logits; here weights and
        mixture are those of probabilities, which do not depend on the scale of a model's logits. Bases are factors
        of the model's own, because few models have the paper's 10000. The default is three factors instead of seven,
        because each costs one prefill.
    Helps: where some positions of a long context are read worse than their neighbours; the paper reports gains in tool
        use and question answering with 7B models of base 10000.
    Hurts: with models of large bases and prompts far shorter than their training length, whose waves have no minimum
        within the prompt: the rows hardly differ, and the additional cost has no benefit.
    Cost: one prefill, one KV cache and one row of every decode step per factor.
    Limits: models whose rotary encoding accepts other angles. The answer depends on the order of the passages.

    Args:
        factors: Factors of the model's RoPE base, 1 to 16 numbers, 0.1 to 10; (1,) changes nothing.
            ``attention.rope.search_factors`` finds factors whose minima do not coincide; it chose the default
            from the paper's range, 1 to 2.8, for the default model.
    """

    name = "multi_base"
    requires = frozenset({Capability.ANGLES})
    identity_parameters = MappingProxyType({"factors": (1.0,)})
    neutral_is_identity = True

    factors: Annotated[tuple[float, ...], NumberList(0.1, 10, min_length=1, max_length=16)] = (1.0, 1.9, 2.8)

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row per factor; a row of factor 1 equals the unmodified model."""
        rows = tuple(
            RowPlan(rope_base_factor=None if factor == 1.0 else factor, reusable=layout.boundaries)
            for factor in self.factors
        )
        return Plan(rows=rows, combine=weigh_by_confidence)
