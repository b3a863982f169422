"""T5's relative bias: a learned number per head and bucket of distances is added to the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from rag_posfix.errors import ConfigError
from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions, attend_with_bias, distances
from rag_posfix.parameters import Integer


def bucket_of(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance: the distance itself in the first half, then logarithmic.

    Formula: with e = buckets // 2: d for d < e, else
        min(e + floor(log(d / e) / log(max_distance / e) (buckets - e)), buckets - 1). Below 0: bucket 0.

    Shapes:
        distance: any, int64. returns: the same.
    """
    exact = buckets // 2
    near = distance.clamp(min=0)
    far = (near.clamp(min=exact).double() / exact).log() / math.log(max_distance / exact) * (buckets - exact)
    # Powers of the ratio fall on whole numbers, which rounding must not miss by a little.
    far_bucket = (exact + (far + 1e-9).floor().long()).clamp(max=buckets - 1)
    return torch.where(near < exact, near, far_bucket)


class _Buckets(Positions):
    def __init__(self, heads: int, buckets: int, max_distance: int) -> None:
        super().__init__()
        self.buckets, self.max_distance = buckets, max_distance
        self.bias = nn.Parameter(torch.zeros(heads, buckets))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        distance = distances(query.shape[2], key.shape[2], query.device)
        return attend_with_bias(query, key, value, self.bias[:, bucket_of(distance, self.buckets, self.max_distance)])


@ENCODINGS.register("t5", aliases=("relative_bias",))
@dataclass(frozen=True)
class T5(Encoding):
    """Add a learned number per head and bucket of distances to the scores.

    Near distances have a bucket each, far ones share buckets that widen with the distance.

    Source: Raffel et al. (2020), T5, section 2.1, https://arxiv.org/abs/1910.10683
    Formula: score_ij = q_i k_j / sqrt(D) + b[h, bucket(i - j)], ``bucket_of``; b is shared by all layers.
    Differs from the paper: scores are divided by sqrt(D), which T5 folds into its start values; b starts at 0.
    Cost: a bias of O(T^2) memory per head, shared by the sequences of a batch.
    Limits: all distances from about ``max_distance`` on are alike.

    Args:
        buckets: Number of buckets, 2 or more.
        max_distance: Distance from which all share the last bucket; above half of the buckets.

    Raises:
        ConfigError: ``max_distance`` is not above half of the buckets.
    """

    name = "t5"
    memory = "per head"

    buckets: Annotated[int, Integer(2)] = 32
    max_distance: Annotated[int, Integer(2)] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_distance <= self.buckets // 2:
            raise ConfigError(
                f"t5: max_distance={self.max_distance} must be above half of buckets={self.buckets}; nearer distances "
                "have a bucket each"
            )

    def build(self, shape: DecoderShape) -> Positions:
        """Return biases of 0."""
        return _Buckets(shape.heads, self.buckets, self.max_distance)
