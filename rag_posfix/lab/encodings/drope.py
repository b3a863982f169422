"""DroPE: RoPE in most steps of the training, no position encoding in the last ones and in the trained decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rag_posfix.attention.masks import attend_causal
from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions
from rag_posfix.lab.encodings.rope import RotaryAngles
from rag_posfix.parameters import Integer, Number


class _DroppedRotation(Positions):
    dropped: Tensor

    def __init__(self, rotary: RotaryAngles, growth: float, train_length: int) -> None:
        super().__init__()
        self.rotary, self.growth, self.train_length = rotary, growth, train_length
        self.register_buffer("dropped", torch.tensor(False))  # part of checkpoints and of saved decoders

    def finalize(self) -> None:
        self.dropped = torch.ones_like(self.dropped)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not self.dropped:
            query, key = self.rotary.rotate(query, key)
        elif self.growth:
            n_query, n_key = query.shape[2], key.shape[2]
            length = torch.arange(n_key - n_query + 1, n_key + 1, device=query.device)  # (Tq,)
            scale = 1 + self.growth * (length / self.train_length).clamp(min=1).log()
            query = query * scale[:, None].to(query.dtype)
        return attend_causal(query, key, value, query.shape[-1] ** -0.5)


@ENCODINGS.register("drope")
@dataclass(frozen=True)
class Drope(Encoding):
    """Train with RoPE, and drop it for the last steps and for good.

    RoPE makes training fast, but holds a decoder to trained distances. A short recalibration without rotation, at the
    trained length, lets the causal mask take over.

    Source: Gelberg et al. (2025), DroPE, https://arxiv.org/abs/2512.12167
    Formula: score_mn = (R_m q_m) (R_n k_n) / sqrt(D) in the first 1 - ``recalibration`` of the steps, then and in the
        trained decoder beta q_m k_n / sqrt(D), beta = 1 + c ln(s), c = ``growth``, s = max(1, m / ``train_length``),
        positions m from 1.
    Differs from the paper: s is that of each query, not of the full text, so that a token's output does not change
        when the text grows. Short trainings give a larger share to the recalibration (paper: .5 to 5 % of the tokens).
    Cost: fused SDPA.

    Args:
        recalibration: Share of the training steps without rotation, above 0 and up to 1; at least one step.
        base: Of RoPE's wavelengths, above 1.
        growth: c, how fast scores grow beyond ``train_length``, 0 to 10; 0 leaves them.
        train_length: Longest sequence of training, 1 or more.
    """

    name = "drope"

    recalibration: Annotated[float, Number(0, 1, exclusive_min=True)] = 0.1
    base: Annotated[float, Number(1, 1e9, exclusive_min=True)] = 10000.0
    growth: Annotated[float, Number(0, 10)] = 0.0
    train_length: Annotated[int, Integer(1)] = 512

    @property
    def final_from(self) -> float:
        """Share of the steps with RoPE."""
        return 1 - self.recalibration

    def build(self, shape: DecoderShape) -> Positions:
        """Return a module that rotates until ``finalize`` is called, and whose state says whether it was."""
        return _DroppedRotation(RotaryAngles(self.base), self.growth, self.train_length)
