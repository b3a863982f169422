"""Learned absolute positions: a vector per position is added to the token embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from rag_posfix.errors import ConfigError
from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions
from rag_posfix.parameters import Integer


class _Table(Positions):
    def __init__(self, n_positions: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(n_positions, width) * width**-0.5)

    def embed(self, states: Tensor, start: int) -> Tensor:
        stop, max_positions = start + states.shape[1], self.table.shape[0]
        if stop > max_positions:
            raise ConfigError(
                f"learned: a sequence of {stop} tokens has no position vector after {max_positions}; "
                f"use a shorter sequence or learned:max_positions={stop}"
            )
        return states + self.table[start:stop]


@ENCODINGS.register("learned", aliases=("absolute", "ape"))
@dataclass(frozen=True)
class Learned(Encoding):
    """Add a learned vector per position to the token embeddings.

    Source: Gehring et al. (2017), https://arxiv.org/abs/1705.03122; Radford et al. (2019), GPT-2
    Formula: x_t = E[token_t] + P[t]
    Limits: no sequence longer than ``max_positions``. Positions that training never reached keep their random start
        values, so longer sequences than in training are read badly.
    Cost: max_positions x width parameters; attention is fused SDPA.

    Args:
        max_positions: Number of positions, 1 or more.
    """

    name = "learned"

    max_positions: Annotated[int, Integer(1)] = 2048

    def build(self, shape: DecoderShape) -> Positions:
        """Return a table of random vectors with a norm of about 1."""
        return _Table(self.max_positions, shape.width)
