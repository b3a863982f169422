"""Sinusoidal absolute positions: sines and cosines of the position are added to the token embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions
from rag_posfix.parameters import Number


def sinusoids(positions: Tensor, width: int, base: float) -> Tensor:
    """Return PE(t, 2i) = sin(t / base^(2i / width)) and PE(t, 2i + 1) = cos of the same.

    Shapes:
        positions: (T,). returns: (T, width) float32.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    angles = positions.double()[:, None] * base**-exponents  # (T, width / 2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()  # (T, width)


class _Sinusoids(Positions):
    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base

    def embed(self, states: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + states.shape[1], device=states.device)
        width = states.shape[2]
        scale = math.sqrt(2 / width)  # norm 1, as of a token's embedding
        added: Tensor = sinusoids(positions, width, self.base) * scale
        return states + added.to(states.dtype)


@ENCODINGS.register("sinusoidal", aliases=("sin",))
@dataclass(frozen=True)
class Sinusoidal(Encoding):
    """Add sines and cosines of the position to the token embeddings.

    Source: Vaswani et al. (2017), Attention Is All You Need, section 3.5, https://arxiv.org/abs/1706.03762
    Formula: x_t = E[token_t] + sqrt(2 / width) PE(t); PE(t, 2i) = sin(t / base^(2i / width)), PE(t, 2i + 1) = cos of
        the same. A shift of t by k is a rotation of PE(t) that does not depend on t.
    Differs from the paper: PE is divided by its norm, sqrt(width / 2), where the paper multiplies embeddings by
        sqrt(width).
    Cost: nothing that is learned; attention is fused SDPA.

    Args:
        base: Ratio of the longest wavelength to the shortest, above 1.
    """

    name = "sinusoidal"

    base: Annotated[float, Number(1, 1e9, exclusive_min=True)] = 10000.0

    def build(self, shape: DecoderShape) -> Positions:
        """Return a module without parameters."""
        return _Sinusoids(self.base)
