"""Blended: cached passages are moved to their positions, and some of their tokens are recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from rag_posfix.errors import ConfigError
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Integer, Number
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Blend, Capability, ModelShape, Plan


@MITIGATIONS.register("blended", aliases=("cacheblend",))
@dataclass(frozen=True)
class Blended(Mitigation):
    """Reuse cached passages at new positions and recompute some of their tokens.

    It approximates what the unmodified model computes for the prompt in the given order, in less time. Passages are
    encoded independently and cached, as under the order-invariant methods, which share the cache entries. Their keys
    are rotated to the new positions. Then the tokens whose values deviate most from a full computation, or that the
    question attends to, are recomputed with attention to everything before them.

    Source: Yao et al. (2024), CacheBlend, section 4, https://arxiv.org/abs/2405.16444; ``choose="first"``: Hu et al.
        (2024), EPIC (LegoLink), section 4, https://arxiv.org/abs/2410.15332; ``choose="query"``: Wang et al. (2026),
        ProphetKV, https://arxiv.org/abs/2602.02579
    Formula: k of a token at position m of a passage that was encoded at P and is at position a: R_(a - P) k. The
        layers 0..layers-1 are computed for all tokens; S = the ceil(fraction T) tokens of passages with the largest
        sum of (V - V cached)^2 in layer ``layers`` - 1; the tokens of S are computed in every layer and replace the
        cached ones. fraction=1 is the unmodified model. With ``query``, S are the tokens with the largest attention of
        the question, which is read once after the moved passages: the mean over layers, heads and its tokens.
    Differs from the paper: the chosen tokens are computed in one pass through all layers, including the first ones;
        the paper narrows the choice from layer to layer. Passages are encoded after the shared prefix, not alone. The
        number of recomputed tokens is rounded up and only tokens of passages are chosen; the authors' code rounds
        down, and tokens of the prefix compete. Recomputed tokens attend to earlier positions only; the mask of the
        authors' code is aligned to the bottom right, so that they attend to later ones too. ProphetKV fuses the
        layers' attention in two stages; here all layers choose together, once.
    Helps: the time to first token of prompts with cached passages in other orders or next to other passages, where a
        prefix cache misses.
    Hurts: position bias stays, and the answer depends slightly on the tokens that are not recomputed.
    Cost: with all passages cached, ``layers`` / L of the whole prompt, and ``fraction`` of it; with ``query`` the
        question a second time in place of the layers.
    Limits: models in which every layer has all keys and whose rotary encoding is supported.

    Args:
        fraction: Share of the passages' tokens that is recomputed, 0 to 1. The paper uses .15 to .16.
        choose: ``deviation`` (CacheBlend); ``first``, the first tokens of each passage (LegoLink); or ``query``, the
            tokens that the question attends to (ProphetKV).
        layers: Number of layers that are computed for all tokens to measure the deviation, from 2 to those of the
            model; for ``deviation``. After one layer no value deviates, since its input does not depend on other
            tokens.

    Raises:
        ConfigError: ``layers`` is 1 with ``deviation``.
    """

    name = "blended"
    requires = frozenset({Capability.ROTATION, Capability.FULL_CACHE, Capability.SOFTMAX})
    identity_parameters = MappingProxyType({"fraction": 1.0})

    fraction: Annotated[float, Number(0, 1)] = 0.15
    choose: Literal["deviation", "first", "query"] = "deviation"
    layers: Annotated[int, Integer(1)] = 2

    def __post_init__(self) -> None:
        """Check the parameters."""
        super().__post_init__()
        if self.choose == "deviation" and self.layers < 2:
            raise ConfigError(
                f"blended: layers={self.layers} must be 2 or more with choose='deviation', because the values of the "
                "first layer do not depend on other tokens; use choose='first', or more layers"
            )

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return the unmodified row, prefilled from independently encoded passages.

        Raises:
            ConfigError: the model has fewer than ``layers`` layers.
        """
        if self.choose == "deviation" and self.layers > model.n_layers:
            raise ConfigError(
                f"blended: layers={self.layers} must be at most {model.n_layers}, the layers of this model; lower "
                "layers, or use choose='first'"
            )
        if not layout.n_passages:
            return Plan()
        return Plan(blend=Blend(self.fraction, self.choose, self.layers))
