"""StableMask: pseudo-scores above the diagonal take a part of each softmax, which tells the position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from rag_posfix.attention.masks import pseudo_log_mass
from rag_posfix.lab.encodings.alibi import alibi_bias
from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions, hide_future
from rag_posfix.lab.encodings.rope import RotaryAngles
from rag_posfix.parameters import Integer, Number


class _PseudoScores(Positions):
    def __init__(self, gamma: float, train_length: int, positions: str) -> None:
        super().__init__()
        self.gamma, self.train_length, self.positions = gamma, train_length, positions

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        n_query, n_key, device = query.shape[2], key.shape[2], query.device
        if self.positions == "rope":
            query, key = RotaryAngles().rotate(query, key)
        bias = torch.zeros(1, n_query, n_key, device=device)
        if self.positions == "alibi":
            bias = alibi_bias(query.shape[1], n_query, n_key, device)
        rows = torch.arange(n_key - n_query, n_key, device=device)
        mass = pseudo_log_mass(rows, self.train_length, self.gamma)  # (Tq,), -inf from train_length on
        column = mass[None, :, None].expand(bias.shape[0], -1, 1)
        bias = torch.cat((hide_future(bias), column), dim=-1)  # (H | 1, Tq, Tk + 1)
        # One more key of zeros, whose score is the bias alone, and whose value is zero.
        key, value = (pad(states, (0, 0, 0, 1)) for states in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype)[None])


@ENCODINGS.register("stable_mask", aliases=("stablemask",))
@dataclass(frozen=True)
class StableMask(Encoding):
    """Let pseudo-scores above the diagonal take a part of each softmax; the part falls with the position.

    Attention of a row then sums to less than 1. What is missing depends on the row's place, which encodes the absolute
    position, and no token has to be attended to only because attention must go somewhere.

    Source: Yin et al. (2024), StableMask, https://arxiv.org/abs/2402.04779
    Formula: softmax(A * C + P) * C, C the causal mask, P_ij = -gamma (j - 1) for i < j <= n, counted from 1. Form with
        a KV cache: one more key with the score L_i = log sum_{i < j <= n} exp(P_ij) and the value 0, which gives the
        same rows. A has RoPE or ALiBi in it where ``positions`` says so.
    Differs from the paper: n is ``train_length`` for every row of a text, also of a shorter one, so that a token's
        output does not change when the text grows; rows after the n-th have no pseudo-scores. One gamma for all heads.
    Cost: a bias of O(T^2) memory, shared by the sequences of a batch.

    Args:
        gamma: How fast pseudo-scores fall from token to token, above 0 and up to 100.
        train_length: n, the longest sequence of training, 1 or more.
        positions: What else encodes positions: "none", "rope" or "alibi".
    """

    name = "stable_mask"
    memory = "per head"

    gamma: Annotated[float, Number(0, 100, exclusive_min=True)] = 0.1
    train_length: Annotated[int, Integer(1)] = 512
    positions: Literal["none", "rope", "alibi"] = "rope"

    def build(self, shape: DecoderShape) -> Positions:
        """Return a module without parameters."""
        return _PseudoScores(self.gamma, self.train_length, self.positions)
