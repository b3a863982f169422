"""CoPE: positions count the tokens that a query's gates let through, so that they follow content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions, attend_scores, distances
from rag_posfix.parameters import Integer


def contextual_positions(gates: Tensor, p_max: int) -> Tensor:
    """Return how many gates are open from each key to the query, the query's own included, at most ``p_max``.

    Formula: p_ij = min(sum_{k = j}^{i} g_ik, p_max). Gates of future keys count as 0.

    Shapes:
        gates: (..., Tq, Tk) in 0 to 1. returns: the same, float32: bfloat16 does not count beyond 256.
    """
    future = distances(gates.shape[-2], gates.shape[-1], gates.device) < 0
    open_gates = gates.float().masked_fill(future, 0.0)
    return open_gates.flip(-1).cumsum(dim=-1).flip(-1).clamp(max=p_max)


def interpolate(by_position: Tensor, positions: Tensor) -> Tensor:
    """Return a value between those of the two nearest whole positions.

    Formula: z(p) = (p - floor p) z[ceil p] + (1 - p + floor p) z[floor p]. Floor and ceiling carry no gradient; the
        weights do.

    Shapes:
        by_position: (..., Tq, P + 1). positions: (..., Tq, Tk) in 0 to P. returns: (..., Tq, Tk).
    """
    below = positions.detach().floor()
    weight = (positions - below).to(by_position.dtype)
    low = by_position.gather(-1, below.long())
    high = by_position.gather(-1, positions.detach().ceil().long())
    return low + weight * (high - low)


class CopePositions(Positions):
    """CoPE in a decoder.

    Args:
        tables: Number of position tables: one per layer, or one.
        p_max: The last position.
        size: Channels of a head.
        divide: Divide position scores by sqrt(D) as well.
        softmax: Gates of a query sum to 1.
    """

    def __init__(self, tables: int, p_max: int, size: int, *, divide: bool, softmax: bool = False) -> None:
        super().__init__()
        self.p_max, self.divide, self.softmax = p_max, divide, softmax
        self.table = nn.Parameter(torch.zeros(tables, p_max + 1, size))

    def score(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the content scores, scaled. A subclass may encode positions here as well.

        Shapes:
            query: (B, H, Tq, D). key: (B, H, Tk, D). returns: (B, H, Tq, Tk).
        """
        scores: Tensor = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        return scores

    def gates(self, query: Tensor, key: Tensor) -> Tensor:
        """Return how much each key counts for each query, 0 to 1; those of future keys are not used.

        Shapes:
            query: (B, H, Tq, D). key: (B, H, Tk, D). returns: (B, H, Tq, Tk).
        """
        gates: Tensor = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        if self.softmax:
            future = distances(query.shape[-2], key.shape[-2], gates.device) < 0
            gates = gates.masked_fill(future, float("-inf")).softmax(dim=-1)
        else:
            gates = gates.sigmoid()
        return gates

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention with contextual positions; see ``Positions.attend``."""
        scaling = query.shape[-1] ** -0.5
        gates = self.gates(query, key)
        table = self.table[layer if self.table.shape[0] > 1 else 0]
        by_position = query @ table.transpose(0, 1)  # (B, H, Tq, p_max + 1)
        placed = interpolate(by_position, contextual_positions(gates, self.p_max))
        return attend_scores(self.score(query, key) + placed * (scaling if self.divide else 1.0), value)


@ENCODINGS.register("cope")
@dataclass(frozen=True)
class Cope(Encoding):
    """Count positions in tokens that the query lets count, such as sentence ends, not in tokens.

    A gate per query and key says whether the key counts. The position of a key is the number of open gates between it
    and the query; it need not be whole.

    Source: Golovneva et al. (2024), Contextual Position Encoding, section 4, https://arxiv.org/abs/2405.18719
    Formula: g_ij = sigmoid(q_i k_j / sqrt(D)); p_ij = min(sum_{k = j}^{i} g_ik, p_max); score_ij =
        (q_i k_j + z_i(p_ij)) / sqrt(D), z_i(p) interpolated between q_i e[floor p] and q_i e[ceil p]. With all gates 1
        it is ``shaw`` with e[p] at the distance p - 1; with all gates 0 all keys are at e[0].
    Differs from the paper: the paper's formula has no sqrt(D) in the gates; its code has, and so has this.
    Cost: O(T^2) memory per head and sequence, several tensors of that size; plain softmax. No fused kernel applies,
        because every score needs the gates of all keys after it.
    Limits: trained from the start; a model that was trained without it cannot use it.

    Args:
        p_max: The last position, 1 or more; farther keys share it.
        shared: One table of positions for all layers instead of one per layer.
        divide: Divide position scores by sqrt(D) too; False is the option ``nodiv`` of the paper's code.
        gate: ``softmax`` is for comparison: the gates of a query sum to 1, so that no position is above 1.
    """

    name = "cope"
    memory = "per sequence"

    p_max: Annotated[int, Integer(1)] = 64
    shared: bool = False
    divide: bool = True
    gate: Literal["sigmoid", "softmax"] = "sigmoid"

    def build(self, shape: DecoderShape) -> Positions:
        """Return tables of zeros."""
        tables = 1 if self.shared else shape.layers
        return CopePositions(tables, self.p_max, shape.head_dim, divide=self.divide, softmax=self.gate == "softmax")
