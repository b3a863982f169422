"""CoPE and RoPE together: content scores are rotated, gates and contextual positions are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions
from rag_posfix.lab.encodings.cope import CopePositions
from rag_posfix.lab.encodings.rope import RotaryAngles
from rag_posfix.parameters import Integer, Number


class _Rotated(CopePositions):
    def __init__(self, tables: int, p_max: int, size: int, *, divide: bool, rotary: RotaryAngles) -> None:
        super().__init__(tables, p_max, size, divide=divide)
        self.rotary = rotary

    def content(self, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        return self.rotary.rotate(query, key)


@ENCODINGS.register("cope_rope")
@dataclass(frozen=True)
class CopeRope(Encoding):
    """Add CoPE's position scores to content scores that RoPE rotates.

    Source: Golovneva et al. (2024), https://arxiv.org/abs/2405.18719 (3.9 perplexity on code for CoPE, 4.0
        with RoPE, 4.1 for RoPE alone)
    Formula: score_ij = ((R_i q_i) (R_j k_j) + z_i(p_ij)) / sqrt(D), with z and p of ``cope``
    Differs from the paper: the paper does not say whether gates see rotated queries and keys; here they do not, so
        that contextual positions stay free of token distances.
    Cost: that of ``cope``.

    Args:
        p_max: The last contextual position, 1 or more.
        shared: One table of positions for all layers instead of one per layer.
        divide: Divide position scores by sqrt(D) too.
        base: Of RoPE's wavelengths, above 1.
    """

    name = "cope_rope"

    p_max: Annotated[int, Integer(1)] = 64
    shared: bool = False
    divide: bool = True
    base: Annotated[float, Number(1, 1e9, exclusive_min=True)] = 10000.0

    def build(self, shape: DecoderShape) -> Positions:
        """Return tables of zeros, and a rotation."""
        tables, rotary = (1 if self.shared else shape.layers), RotaryAngles(self.base)
        return _Rotated(tables, self.p_max, shape.head_dim, divide=self.divide, rotary=rotary)
