"""Calibrated attention: the position bias of attention is measured with dummy passages and removed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated

from rag_posfix.attention.masks import scores, segment_ids, weigh
from rag_posfix.lazy_torch import Tensor, torch
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Number
from rag_posfix.plan.bias_profile import BIAS_PROFILE, bias_profile_from, scaled, with_dummy
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import (
    AttentionInput,
    AttentionOverride,
    CalibrationPass,
    Capability,
    ModelShape,
    Plan,
    RowPlan,
)

EQUAL = 1e-5
"""Differences below this share of the measured attention are rounding."""
ROWS = 64
"""Queries at a time whose attention is materialised."""


def passage_weights(measured: Tensor, bias: Tensor, temperature: float) -> Tensor:
    """Return the share of attention per token that each passage gets by its relevance alone.

    Formula: rel = measured - bias; alpha = softmax_k(rel_k / (t std(rel))); uniform if all rel are equal up to
        rounding.

    Shapes:
        measured, bias: (N,). returns: (N,) float32, sums to 1.
    """
    relevance = measured - bias
    rounding = EQUAL * float(measured.abs().mean() + bias.abs().mean()) + torch.finfo(torch.float32).tiny
    standard = (relevance - relevance.mean()) / relevance.std(correction=0).clamp(min=rounding)
    return (standard / temperature).softmax(dim=0)


def redistribute(probabilities: Tensor, segments: Tensor, share: Tensor, strength: float) -> Tensor:
    """Return attention with the same total on all passages, redistributed over the passages by ``share``.

    A passage without any attention in a head stays without attention. Tokens of a passage keep their proportions.

    Shapes:
        probabilities: (..., S) float32 of the passages' tokens. segments: (S,) passage of each token.
        share: (N,) new share of each passage. returns: (..., S).
    """
    tiny = torch.finfo(torch.float32).tiny
    mass = probabilities.new_zeros((*probabilities.shape[:-1], share.shape[0]))
    mass.index_add_(-1, segments, probabilities)
    request = share * (mass > 0)
    request = mass.sum(dim=-1, keepdim=True) * request / request.sum(dim=-1, keepdim=True).clamp(min=tiny)
    factor = 1 - strength + strength * request / mass.clamp(min=tiny)
    return probabilities * factor[..., segments]


@dataclass(frozen=True, eq=False)
class RedistributedAttention(AttentionOverride):
    """Attention in which the last prompt token and generated tokens redistribute their mass over passages.

    Attributes:
        last: Index of the prompt's last token.
        passages: The tokens of all passages.
        segments: (P,) the passage of each of these tokens.
        share: (N,) the share of each passage in the new attention; sums to 1.
        strength: 0 leaves the attention as it is, 1 replaces it.
        layers: The layers that do so; None: all.
    """

    needs_mask = True

    last: int
    passages: slice
    segments: Tensor
    share: Tensor
    strength: float
    layers: range | None = None

    @classmethod
    def of(cls, layout: Layout, layers: range, alpha: Tensor, strength: float) -> RedistributedAttention:
        """Return the override for a prompt; ``alpha`` is (N,), the calibrated attention per token of each passage."""
        passages = slice(layout.prefix.stop, layout.suffix.start)
        segments = segment_ids(layout, layout.passages)[passages] - 1
        share = alpha * torch.tensor([len(span) for span in layout.passages])
        return cls(len(layout.token_ids) - 1, passages, segments, share / share.sum(), strength, layers)

    def on(self, device: torch.device) -> RedistributedAttention:
        """Return a copy with its tensors on a device."""
        return replace(self, segments=self.segments.to(device), share=self.share.to(device))

    def __call__(self, inputs: AttentionInput) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the last token's attention averaged over heads; None if no token is calibrated."""
        n_query = inputs.query.shape[2]
        before = min(max(self.last - inputs.start, 0), n_query)  # tokens of the prompt, but for the last
        outs = [inputs.standard_attention()[:, :, :before]] if before else []
        last_attention = None
        for start in range(before, n_query, ROWS):
            probabilities = self._rows(inputs, start, min(start + ROWS, n_query))
            outs.append(weigh(probabilities, inputs.value))
            last_attention = probabilities[:, :, -1].mean(dim=1)
        return torch.cat(outs, dim=2), last_attention

    def _rows(self, inputs: AttentionInput, start: int, stop: int) -> Tensor:
        """Return calibrated attention of the pass's queries ``start``..``stop`` - 1, (B, Hq, stop - start, Tk)."""
        logits = scores(inputs.query[:, :, start:stop], inputs.key, inputs.scaling)
        device = logits.device
        if stop - start > 1 or inputs.start + stop < inputs.key.shape[2]:
            rows = torch.arange(inputs.start + start, inputs.start + stop, device=device)[:, None]
            logits = logits.masked_fill(torch.arange(inputs.key.shape[2], device=device) > rows, float("-inf"))
        probabilities = logits.softmax(dim=-1)
        probabilities[..., self.passages] = redistribute(
            probabilities[..., self.passages], self.segments, self.share, self.strength
        )
        return probabilities


@MITIGATIONS.register("calibrated_attention", aliases=("found_in_the_middle",))
@dataclass(frozen=True)
class CalibratedAttention(Mitigation):
    """Measure the attention that each slot gets regardless of content, and remove it from the attention to passages.

    The attention to a passage has two parts: its relevance and the bias of its slot. A dummy passage without content,
    in the same slot, gets the bias alone, so the difference of the two measures the relevance. During the answer, the
    attention to passages is redistributed in proportion to this relevance.

    Source: Hsieh et al. (2024), Found in the Middle: Calibrating Positional Attention Bias, section 3,
        https://arxiv.org/abs/2406.16008
    Formula: Attn(D, k) = mean attention per token of passage D in slot k, by the prompt's last token, averaged over
        layers and heads; rel(D_k) = Attn(D_k, k) - Attn(dummy, k); alpha = softmax_k(rel(D_k) / t). In the last half
        of the layers, for the prompt's last token and every generated one, in each head:
        a'(token i of D_k) = alpha_k / Attn(D_k) * a(i) * C, C such that the total attention to passages is unchanged,
        Attn(D_k) that head's own mean attention per token.
        With ``strength`` s: (1 - s) a + s a'.
    Differs from the paper: rel is divided by its standard deviation over the slots before the softmax, because the
        paper's t = 5e-5 depends on the size of attention in its prompts. The paper does not specify the dummy: here it
        has the length of the passage and repeats the sixteen tokens that occur in the most passages; the separator
        after it is unchanged. The question is not repeated before the passages. A stored profile may replace the
        dummies; it is interpolated to the number of slots and scaled to the mean attention of the prompt.
    Helps: passages in the middle.
    Hurts: the first position, which loses its bias.
    Cost: the prompt is read once, and again from each dummy on: about N / 2 + 1 prefills for N passages. With a
        profile one prefill. Decoding computes one row of attention weights in half of the layers.
    Limits: models in which every layer has all keys. The answer still depends on the order of the passages.

    Args:
        temperature: t, above 0 and up to 100, in standard deviations of rel; the larger, the more equal the shares of
            the passages.
        strength: 0 leaves attention unchanged, 1 replaces it by the calibrated attention.
        profile: Measured attention to a dummy in each slot, 2 to 1000 numbers in any unit. The command line also takes
            the path of a file that ``rag-posfix probe slot-attention`` wrote. None measures dummies for each prompt.
    """

    name = "calibrated_attention"
    requires = frozenset({Capability.FULL_CACHE, Capability.SOFTMAX})
    identity_parameters = MappingProxyType({"strength": 0.0})
    neutral_is_identity = True
    uses_last_prompt_token = True
    file_parameters = MappingProxyType({"profile": bias_profile_from("profile")})

    temperature: Annotated[float, Number(0, 100, exclusive_min=True)] = 0.5
    strength: Annotated[float, Number(0, 1)] = 1.0
    profile: Annotated[tuple[float, ...] | None, BIAS_PROFILE] = None

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return a calibration pass over the prompt, and over dummies without a profile; none for one passage."""
        if layout.n_passages < 2 or self.strength == 0:
            return Plan()
        dummies = [] if self.profile else [with_dummy(layout, slot) for slot in range(layout.n_passages)]

        def decide(measured: Tensor) -> Plan:
            attention = measured[0]
            if self.profile:
                bias = torch.tensor(scaled(self.profile, attention.tolist()), dtype=torch.float32)
            else:
                bias = measured[1:].diagonal()
            alpha = passage_weights(attention, bias, self.temperature)
            layers = range(model.n_layers // 2, model.n_layers)
            return Plan(rows=(RowPlan(attend=RedistributedAttention.of(layout, layers, alpha, self.strength)),))

        return Plan(calibration=CalibrationPass(layouts=(layout, *dummies), decide=decide, continue_from=0))
