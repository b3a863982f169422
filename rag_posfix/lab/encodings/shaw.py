"""Shaw's relative positions: a learned vector per distance, clipped, is added to the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions, attend_scores, distances
from rag_posfix.parameters import Integer


class _Vectors(Positions):
    def __init__(self, layers: int, max_distance: int, size: int) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.vectors = nn.Parameter(torch.zeros(layers, max_distance + 1, size))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        distance = distances(query.shape[2], key.shape[2], query.device).clamp(0, self.max_distance)
        by_distance = query @ self.vectors[layer].transpose(0, 1)  # (B, H, Tq, max_distance + 1)
        relative = by_distance.gather(-1, distance.expand(*query.shape[:3], key.shape[2]))  # (B, H, Tq, Tk)
        return attend_scores((query @ key.transpose(-1, -2) + relative) * query.shape[-1] ** -0.5, value)


@ENCODINGS.register("shaw", aliases=("relative",))
@dataclass(frozen=True)
class Shaw(Encoding):
    """Add a learned vector per distance, clipped at the longest one, to the keys.

    With a ``max_distance`` above all distances of training, longer sequences meet vectors that were never trained;
    with a smaller one all far keys are alike at any length.

    Source: Shaw et al. (2018), Self-Attention with Relative Position Representations, equation 5,
        https://arxiv.org/abs/1803.02155
    Formula: score_ij = q_i (k_j + a[min(i - j, max_distance)]) / sqrt(D); a per layer, shared by its heads.
    Differs from the paper: there are no vectors for values and none for future keys; vectors start at 0.
    Cost: O(T^2) memory per head and sequence; plain softmax.

    Args:
        max_distance: Longest distance with a vector of its own, 1 or more.
    """

    name = "shaw"
    memory = "per sequence"

    max_distance: Annotated[int, Integer(1)] = 64

    def build(self, shape: DecoderShape) -> Positions:
        """Return vectors of zeros."""
        return _Vectors(shape.layers, self.max_distance, shape.head_dim)
