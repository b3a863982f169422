"""Blended kv_lookup: passages read apart are moved to their places, and the tokens that suffer most are read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Number, Whole
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.model_shape import Capability, ModelShape
from rag_posfix.plan.plan import Blend, Plan

__all__ = ["Blended"]


@MITIGATIONS.register("blended", aliases=("cacheblend",))
@dataclass(frozen=True)
class Blended(Mitigation):
    """Take passages from the store, move them to where they stand now, and read again only what that gets wrong.

    A correction of speed, not of order: it comes close to what the unmodified model computes for the prompt as it
    stands, in a fraction of the time, whatever order the passages come in. Passages are read apart and kept, as the
    order-free methods keep theirs (and shared with them); their keys are rotated to their new positions; then the
    tokens whose values differ most from what they should be are computed anew, seeing everything before them.

    Source: Yao et al. (2024), CacheBlend, section 4, https://arxiv.org/abs/2405.16444; ``choose="first"``: Hu et al.
        (2024), EPIC (LegoLink), section 4, https://arxiv.org/abs/2410.15332
    Formula: k of a token at position m of a passage that was read at P and stands at a: R_(a - P) k. The layers
        0..layers-1 are computed for all tokens; S = the ceil(fraction T) tokens of passages with the largest
        sum of (V - V kept)^2 in layer ``layers`` - 1; the tokens of S are computed in every layer and replace what was
        kept. fraction=1 is the unmodified model.
    Differs from the paper: the chosen tokens are computed in one pass through all layers, the first ones again with
        them; the paper narrows its choice down from layer to layer. Passages are encoded after the shared prefix.
    Helps: the time to the first token of prompts whose passages come again in other orders, beside other passages,
        where a prefix cache finds nothing.
    Hurts: nothing is corrected: the answer depends on the order as the unmodified model's does, and a little on what
        was not read again.
    Cost: with all passages found, layers / L of the prompt and the fraction of it, against the whole prompt.
    Limits: models whose every layer keeps all keys and whose rotation is ours.

    Args:
        fraction: How many of the passages' tokens are read again, 0 to 1. The paper uses .15 to .16.
        choose: ``deviation`` (CacheBlend) or ``first``, the first tokens of each passage (LegoLink).
        layers: Layers that are computed for all tokens to see which deviate, 1 or more; for ``deviation``.
    """

    name: ClassVar[str] = "blended"
    paper: ClassVar[str] = "Yao et al. (2024), CacheBlend, https://arxiv.org/abs/2405.16444"
    deviations: ClassVar[tuple[str, ...]] = (
        "The tokens are chosen once, after the first layers, and not anew from layer to layer.",
        "Passages are encoded after the prompt's prefix, not alone.",
    )
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.ROTATION, Capability.FULL_CACHE})
    neutral: ClassVar[Mapping[str, Any]] = MappingProxyType({"fraction": 1.0})

    fraction: Annotated[float, Number(0, 1)] = 0.15
    choose: Literal["deviation", "first"] = "deviation"
    layers: Annotated[int, Whole(1)] = 2

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return the unmodified row, to be read from passages that were read apart."""
        if not layout.n_passages:
            return Plan()
        return Plan(blend=Blend(self.fraction, self.choose, min(self.layers, model.n_layers)))
