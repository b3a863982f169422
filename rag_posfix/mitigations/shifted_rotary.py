"""Shifted rotary: distances beyond a threshold are shifted to shorter ones, which are more frequent in training."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from rag_posfix.attention.masks import attend_segments, attend_with_lse, last_row, merge
from rag_posfix.attention.rope import add_rotation
from rag_posfix.errors import ConfigError
from rag_posfix.lazy_torch import Tensor, torch
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Integer, Number
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import AttentionInput, AttentionOverride, Capability, ModelShape, Plan, RowPlan


def attend_band(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, start: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return attention of the tokens ``start``.. over themselves and the ``width`` - 1 tokens before each.

    A block of up to width - 1 queries sees three segments of keys: in front a triangle, since each query loses one
    key more than the one before it; then keys that all of them see; then themselves, causally. The triangle is causal
    attention with queries and keys in reverse.

    Shapes:
        query: (B, Hq, Tq, D), the tokens start..start + Tq - 1. key, value: (B, Hkv, Tk, D), from token 0.
        returns: (B, Hq, Tq, D) and the log-sum-exp (B, Hq, Tq).
    """
    blocks = []
    first, end = start, start + query.shape[2]
    while first < end:
        stop = min(end, width if first < width else first + width - 1)
        block = query[:, :, first - start : stop - start]
        if first < width:  # all earlier keys are within reach of all these queries
            blocks.append(attend_segments(block, key, value, scaling, first, [(0, first)]))
        else:
            common = stop - width + 1  # first key of the last query
            front = slice(first - width + 1, common)  # from the first key of the first query
            out, lse = attend_with_lse(
                block.flip(2), key[:, :, front].flip(2), value[:, :, front].flip(2), scaling, causal=stop - first > 1
            )
            near = attend_segments(block, key, value, scaling, first, [(common, first)])
            blocks.append(merge([(out.flip(2), lse.flip(2)), near]))
        first = stop
    return torch.cat([out for out, _ in blocks], dim=2), torch.cat([lse for _, lse in blocks], dim=2)


class _ShiftedFar(AttentionOverride):
    """Two segments: near keys from the query's own position, far keys from a position that is nearer to them."""

    def __init__(self, threshold: int, window: int) -> None:
        self.threshold = threshold
        self.window = window

    def __call__(self, inputs: AttentionInput) -> tuple[Tensor, Tensor | None]:
        n_query, n_key = inputs.query.shape[2], inputs.key.shape[2]
        if n_key <= self.threshold and n_query in (1, n_key):
            return inputs.standard_attention(), None
        near = inputs.query
        before = max(self.threshold - inputs.start, 0)  # queries without far keys
        if before >= n_query:
            return self._near(near, inputs)[0], None
        nearer = inputs.positions.new_full((1, 1), float(self.window - self.threshold))
        far = add_rotation(near[:, :, before:], inputs.rotate.phases(nearer))
        out, lse = self._near(near, inputs)
        n_far = n_key - self.threshold  # far keys of the last query; each query before it has one less
        beyond = attend_with_lse(
            far, inputs.key[:, :, :n_far], inputs.value[:, :, :n_far], inputs.scaling, causal=far.shape[2] > 1
        )
        both, _ = merge([(out[:, :, before:], lse[:, :, before:]), beyond])
        last_attention = self._last_attention(near, far, inputs) if inputs.needs_weights else None
        return torch.cat((out[:, :, :before], both), dim=2), last_attention

    def _near(self, query: Tensor, inputs: AttentionInput) -> tuple[Tensor, Tensor]:
        if query.shape[2] == 1:
            near = slice(max(inputs.start + 1 - self.threshold, 0), None)
            return attend_with_lse(query, inputs.key[:, :, near], inputs.value[:, :, near], inputs.scaling)
        return attend_band(query, inputs.key, inputs.value, inputs.scaling, inputs.start, self.threshold)

    def _last_attention(self, near: Tensor, far: Tensor, inputs: AttentionInput) -> Tensor:
        n_far = inputs.key.shape[2] - self.threshold
        segments = (
            last_row(far, inputs.key[:, :, :n_far], inputs.scaling),
            last_row(near, inputs.key[:, :, n_far:], inputs.scaling),
        )
        return torch.cat(segments, dim=-1).softmax(dim=-1).mean(dim=(1, 2))


@MITIGATIONS.register("shifted_rotary", aliases=("string",))
@dataclass(frozen=True)
class ShiftedRotary(Mitigation):
    """Shift distances beyond a threshold to shorter distances, which are more frequent in training.

    Every training text has short distances and only the longest have long ones, so a model uses the far end of its
    context window badly. Distances beyond a threshold are shifted to shorter ones. Distances below the threshold,
    which matter for grammar, are unchanged.

    Source: An et al. (2024), STRING, https://arxiv.org/abs/2410.18745
    Formula: score(m, n) = (R_d' q_m)^T k_n with d = m - n and
        d' = d for d < S;  d' = d - S + W for d >= S.
        S = threshold, W = window. The near and far keys of each query are merged by log-sum-exp.
    Differs from the paper: nothing in the formula. The authors' code multiplies cosine and sine by 0.1 ln 2 + 1
        for Llama and Mistral, and counts the key at distance S twice at prefill.
    Helps: prompts that are longer than a third of the context window.
    Hurts: prompts shorter than the threshold are unchanged. The method changes distances, not the order: shifted
        distances repeat near ones, so the order between near and far passages becomes ambiguous.
    Cost: no T x T tensor; prefill as much attention as the unmodified model, in segments; decoding two attention calls
        per layer.
    Limits: models whose rotary encoding is supported and in which every layer has all keys. Not order-invariant.

    Args:
        threshold: S in tokens, 2 or more; None = ``share`` of the model's context window.
        share: S as a share of the context window, above 0 and up to 1. The paper uses 1/3 (0.25 to 0.4).
        window: W in tokens, 0 to S. The paper uses 128 (128 to 512). Equal to S it changes nothing.
    """

    name = "shifted_rotary"
    requires = frozenset({Capability.ROTATION, Capability.FULL_CACHE, Capability.SOFTMAX})
    identity_parameters = MappingProxyType({"share": 1.0})
    neutral_is_identity = True

    threshold: Annotated[int | None, Integer(2)] = None
    share: Annotated[float, Number(0, 1)] = 1 / 3
    window: Annotated[int, Integer(0)] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            self._check_window(self.threshold)

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row with shifted far distances; the unmodified row if the prompt is below the threshold."""
        threshold = round(self.share * model.context_window) if self.threshold is None else self.threshold
        if threshold >= model.context_window:
            return Plan()
        self._check_window(threshold)
        return Plan(rows=(RowPlan(attend=_ShiftedFar(threshold, self.window)),))

    def _check_window(self, threshold: int) -> None:
        if threshold < 2 or self.window > threshold:
            raise ConfigError(
                f"shifted_rotary: window={self.window} must be at most the threshold, which is {threshold} tokens and "
                "must be at least 2; lower window or raise threshold or share"
            )
