"""Adaptive parallel encoding: passages are encoded independently, and the attention to them is sharpened."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from rag_posfix.attention.masks import attend_with_lse, last_row, merge, window_positions, windows_mask, windows_of
from rag_posfix.lazy_torch import Tensor, torch
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Number
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import AttentionInput, AttentionOverride, Capability, ModelShape, Plan, RowPlan


class TwoGroupAttention(AttentionOverride):
    """Attention of question and answer to two groups of keys, passages and all other tokens, merged by log-sum-exp.

    Formula: (o_C, l_C) = attention over the passages with scores / T; (o_O, l_O) = over prefix, question and answer;
        (w_C, w_O) = softmax(S l_C, l_O); o = w_C o_C + w_O o_O.
    """

    needs_mask = True
    differentiable = True

    def __init__(self, first: int, end: int, temperature: float, scale: float) -> None:
        self._first, self._end = first, end  # the passages' tokens
        self._temperature, self._scale = temperature, scale

    def __call__(self, inputs: AttentionInput) -> tuple[Tensor, Tensor | None]:
        """Return ordinary attention for prefix and passages, and two-group attention for the tokens after them."""
        skipped = max(0, self._end - inputs.start)
        late = inputs.query[:, :, skipped:]
        outs = [inputs.standard_attention()[:, :, :skipped]] if skipped else []
        outs.append(self._two_groups(inputs, late))
        return torch.cat(outs, dim=2), self._last_attention(inputs) if inputs.needs_weights else None

    def _two_groups(self, inputs: AttentionInput, query: Tensor) -> Tensor:
        key, value, scaling = inputs.key, inputs.value, inputs.scaling
        runs = [slice(0, self._first)] if self._first else []
        runs.append(slice(self._end, None))  # question and answer, causally
        others = [attend_with_lse(query, key[:, :, run], value[:, :, run], scaling, run.stop is None) for run in runs]
        passages = slice(self._first, self._end)
        out, lse = attend_with_lse(query, key[:, :, passages], value[:, :, passages], scaling / self._temperature)
        return merge([(out, self._scale * lse), *others])[0]

    def _last_attention(self, inputs: AttentionInput) -> Tensor:
        """Return the attention of the last token, (B, Tk)."""
        scores = last_row(inputs.query, inputs.key, inputs.scaling)
        groups = torch.full((scores.shape[-1],), False, device=scores.device)
        groups[self._first : self._end] = True
        context = (scores / self._temperature).masked_fill(~groups, float("-inf"))
        other = scores.masked_fill(groups, float("-inf"))
        lse = torch.cat([self._scale * context.logsumexp(-1, True), other.logsumexp(-1, True)], dim=-1).softmax(-1)
        mass = context.softmax(-1) * lse[..., :1] + other.softmax(-1) * lse[..., 1:]
        return mass.mean(dim=(1, 2))


@MITIGATIONS.register("parallel_encoding", aliases=("ape",))
@dataclass(frozen=True)
class ParallelEncoding(Mitigation):
    """Encode every passage independently after a shared prefix, and sharpen the question's attention to the passages.

    Independently encoded passages all start at the same position, so each has its own high scores, and the question's
    attention is spread too evenly. A temperature below 1 sharpens the attention to passages; a scale below 1 reduces
    the total attention that the sharpening added. Both act on the passages as one group of keys, merged with the other
    keys by log-sum-exp.

    Source: Yang et al. (2025), APE: Adaptive Parallel Encoding, section 4, https://arxiv.org/abs/2502.05431
    Formula: (o_C, l_C) = attention of question and answer over the passages with scores / (T sqrt(D)), l the
        log-sum-exp; (o_O, l_O) = over prefix, question and answer; (w_C, w_O) = softmax(S l_C, l_O);
        o = w_C o_C + w_O o_O. Positions as in set prompting: passages share their start, the suffix follows the
        longest. With T = S = 1 it is plain parallel encoding.
    Differs from the paper: the scale multiplies l_C as in the text of the paper; its code multiplies by S T. Passages
        are stored in canonical order (by content).
    Helps: where plain parallel encoding is close; the prefill of long prompts.
    Hurts: small models, and questions that need a comparison of passages. S l_C is not invariant to a shift of the
        scores: where l_C is negative, S < 1 raises the attention to passages instead of lowering it.
    Cost: less than the unmodified model at prefill; two attention calls instead of one per layer after it.
    Limits: models in which every layer has all keys and whose positions can be set.

    Args:
        temperature: T, divisor of the scores of the passages, 0.1 to 10.
        scale: S, factor of the log-sum-exp of the passages, 0.1 to 10.
    """

    name = "parallel_encoding"
    order_invariant = True
    requires = frozenset({Capability.POSITIONS, Capability.FULL_CACHE, Capability.SOFTMAX})
    identity_parameters = MappingProxyType({"temperature": 1.0, "scale": 1.0})

    temperature: Annotated[float, Number(0.1, 10)] = 0.9
    scale: Annotated[float, Number(0.1, 10)] = 0.9

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row with independent passages and two-group attention after them."""
        if not layout.n_passages:
            return Plan()
        order = layout.canonical_order()
        row = layout.select(order)
        windows = windows_of(row, None)
        attend = TwoGroupAttention(row.passages[0].start, row.suffix.start, self.temperature, self.scale)
        mask = windows_mask(row, windows)
        return Plan(
            rows=(RowPlan(passages=order, positions=window_positions(row, windows), mask=mask, attend=attend),),
            independent_passages=True,
        )
