"""Stable mask: pseudo-scores above the diagonal take a part of each softmax, which is discarded."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from rag_posfix.attention.masks import attend_with_lse, last_row, pseudo_log_mass
from rag_posfix.lazy_torch import Tensor, torch
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Integer, Number
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import AttentionInput, AttentionOverride, Capability, ModelShape, Plan, RowPlan


class _PseudoScores(AttentionOverride):
    """One more score per query, the log-sum-exp of its pseudo-scores, whose value is zero."""

    def __init__(self, gamma: float, n_tokens: int) -> None:
        self.gamma = gamma
        self.n_tokens = n_tokens
        self.standard_from = n_tokens - 1  # no key above the diagonal remains

    def __call__(self, inputs: AttentionInput) -> tuple[Tensor, Tensor | None]:
        n_query, n_key = inputs.query.shape[2], inputs.key.shape[2]
        out, lse = attend_with_lse(inputs.query, inputs.key, inputs.value, inputs.scaling, causal=n_query > 1)
        pseudo = pseudo_log_mass(torch.arange(inputs.start, n_key, device=lse.device), self.n_tokens, self.gamma)
        retained = (lse - pseudo).sigmoid()  # Z / (Z + exp(pseudo)), (B, Hq, Tq)
        out = (out * retained[..., None]).to(out.dtype)
        if not inputs.needs_weights or n_key >= self.n_tokens:
            return out, None
        attention = last_row(inputs.query, inputs.key, inputs.scaling).softmax(dim=-1) * retained[:, :, -1:, None]
        attention = attention.mean(dim=(1, 2))  # (B, Tk)
        return out, attention / attention.sum(dim=-1, keepdim=True)


@MITIGATIONS.register("stable_mask", aliases=("stablemask",))
@dataclass(frozen=True)
class StableMask(Mitigation):
    """Discard a part of each token's attention, which falls with the token's position.

    Attention sums to 1, so early tokens, which see few others, must attend to them fully. Pseudo-scores above the
    diagonal take a part of the softmax instead. This part falls with the position, which also encodes the position.
    The method is for models that were trained with it; other models answer worse.

    Source: Yin et al. (2024), StableMask, https://arxiv.org/abs/2402.04779
    Formula: softmax(A * C + P) * C with C the causal mask and P_ij = -gamma (j - 1) for i < j <= n, counted from 1.
        The pseudo-scores of a row enter its denominator only:
        out_i = softmax(A_i) V Z_i / (Z_i + exp(L_i)), Z_i = sum_j exp(A_ij), L_i = logsumexp_{j > i}(P_ij).
        n is the prompt's length, or ``train_length`` if that is longer.
    Differs from the paper: n is fixed after the prefill, because cached keys and values cannot be updated when the
        text grows; generated tokens after the n-th have no pseudo-scores and ordinary attention.
    Helps: models pre-trained with it.
    Hurts: every other model, since each softmax of its prompt loses a part of its attention. No automatic choice uses
        this method.
    Cost: one fused attention call per layer at prefill; decoding after the n-th token is that of the unmodified model.
    Limits: models in which every layer has all keys. Not order-invariant.

    Args:
        gamma: How fast pseudo-scores fall from token to token, above 0 and up to 100: the value of the training.
        train_length: Tokens per sequence in training; None = the length of the prompt.
    """

    name = "stable_mask"
    training_free = False
    requires = frozenset({Capability.FULL_CACHE, Capability.SOFTMAX})
    identity_parameters = MappingProxyType({"gamma": 100.0})
    uses_last_prompt_token = True

    gamma: Annotated[float, Number(0, 100, exclusive_min=True)] = 0.1
    train_length: Annotated[int | None, Integer(1)] = None

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row whose attention has pseudo-scores."""
        n_tokens = max(len(layout.token_ids), self.train_length or 0)
        return Plan(rows=(RowPlan(attend=_PseudoScores(self.gamma, n_tokens)),))
