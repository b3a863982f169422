"""RoPE in most layers, no position encoding in every n-th."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from rag_posfix.attention.masks import attend_causal
from rag_posfix.errors import ConfigError
from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions
from rag_posfix.lab.encodings.rope import RotaryAngles
from rag_posfix.parameters import Integer, Number


class _RotatedLayers(Positions):
    def __init__(self, rotary: RotaryAngles, every: int) -> None:
        super().__init__()
        self.rotary, self.every = rotary, every

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if (layer + 1) % self.every:
            query, key = self.rotary.rotate(query, key)
        return attend_causal(query, key, value, query.shape[-1] ** -0.5)


@ENCODINGS.register("rope_nope", aliases=("rnope",))
@dataclass(frozen=True)
class RopeNope(Encoding):
    """Rotate queries and keys in most layers, and leave every n-th layer without positions.

    Layers with RoPE favour near tokens; layers without it find content at any distance. SmolLM3 and Llama 4 leave
    every fourth layer without RoPE.

    Source: Yang et al. (2025), Rope to Nope and Back Again, https://arxiv.org/abs/2501.18795
    Formula: score_mn = (R_m q_m) (R_n k_n) / sqrt(D); in layers n, 2n, ... (from 1, n = ``every``) q_m k_n / sqrt(D).
    Differs from the paper: layers with RoPE attend to all tokens, not to a sliding window (as in SmolLM3).
    Cost: fused SDPA.

    Args:
        every: n: every n-th layer has no positions, 2 or more, at most the layers of the decoder.
        base: Of RoPE's wavelengths, above 1.
    """

    name = "rope_nope"

    every: Annotated[int, Integer(2)] = 4
    base: Annotated[float, Number(1, 1e9, exclusive_min=True)] = 10000.0

    def build(self, shape: DecoderShape) -> Positions:
        """Return a module without parameters.

        Raises:
            ConfigError: no layer would be without positions.
        """
        if self.every > shape.layers:
            raise ConfigError(
                f"rope_nope: every={self.every} must be at most layers={shape.layers}, or no layer is without "
                "positions; give a smaller every or more layers"
            )
        return _RotatedLayers(RotaryAngles(self.base), self.every)
