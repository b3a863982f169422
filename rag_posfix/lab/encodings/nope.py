"""NoPE: no position encoding; the causal mask alone carries positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from rag_posfix.attention.masks import attend_causal
from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions
from rag_posfix.parameters import Number


class _UniformScale(Positions):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_causal(query, key, value, self.scale * query.shape[-1] ** -0.5)


class _HeadScale(Positions):
    def __init__(self, layers: int, heads: int, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((layers, heads, 1, 1), scale))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_causal(query * self.scale[layer].clamp(min=1), key, value, query.shape[-1] ** -0.5)


@ENCODINGS.register("nope", aliases=("none",))
@dataclass(frozen=True)
class Nope(Encoding):
    """Encode no positions: the causal mask alone tells them.

    A first layer can write the position of a token, since a token at place t attends to t tokens (theorem 1 of
    Kazemnejad et al.). At random start values the output of the first attention has a variance of about sigma^2 / t
    (Chi et al.). Attention spreads out on longer sequences than in training; a scale above 1 makes it sharper.

    Source: Haviv et al. (2022), https://arxiv.org/abs/2203.16634; Kazemnejad et al. (2023),
        https://arxiv.org/abs/2305.19466; Chi et al. (2023), https://arxiv.org/abs/2305.13571. Scale: Wang et al.
        (2024), https://arxiv.org/abs/2404.12224
    Formula: score_ij = lambda q_i k_j / sqrt(D), j <= i; lambda = ``scale`` (UniformScale), or max(lambda_h, 1)
        learned per layer and head from ``scale`` (HeadScale).
    Differs from the paper: scales per head are trained with all other parameters, not after them.
    Cost: fused SDPA.

    Args:
        scale: Factor of all scores, 0.01 to 100; start value of the learned ones.
        per_head: Learn a factor, at least 1, per layer and head.
    """

    name = "nope"

    scale: Annotated[float, Number(0.01, 100)] = 1.0
    per_head: bool = False

    def build(self, shape: DecoderShape) -> Positions:
        """Return a module that scales scores, with parameters where each head has its own factor."""
        if self.per_head:
            return _HeadScale(shape.layers, shape.heads, self.scale)
        return _UniformScale(self.scale)
