"""RoPE: queries and keys are rotated by angles that grow with the position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from rag_posfix.attention.masks import attend_causal
from rag_posfix.attention.rope import rotate_half_split
from rag_posfix.errors import ConfigError
from rag_posfix.lab.encodings.base import ENCODINGS, DecoderShape, Encoding, Positions
from rag_posfix.parameters import Number


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """The angles by which RoPE rotates, and the rotation.

    Formula: angle of pair i at position t: (t / interpolation) (base ntk^(D / (D - 2)))^(-2i / D)

    Attributes:
        base: Of the wavelengths.
        interpolation: Divisor of positions.
        ntk: Factor of context that a larger base makes room for.
    """

    base: float = 10000.0
    interpolation: float = 1.0
    ntk: float = 1.0

    def angles(self, positions: Tensor, size: int) -> Tensor:
        """Return the angle of each pair of channels at each position.

        Shapes:
            positions: (T,). returns: (T, D / 2) float64, D = ``size``.
        """
        base = self.base if self.ntk == 1 else self.base * self.ntk ** (size / (size - 2))
        exponents = torch.arange(0, size, 2, dtype=torch.float64, device=positions.device) / size
        return positions.double()[:, None] / self.interpolation * base**-exponents

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys rotated; key j is at position j, and queries are the last tokens.

        Shapes:
            query: (B, H, Tq, D). key: (B, H, Tk, D). returns: the same.
        """
        n_query, n_key, size = query.shape[2], key.shape[2], key.shape[3]
        angle = self.angles(torch.arange(n_key, device=key.device), size).repeat(1, 2)  # (Tk, D)
        cos, sin = angle.cos().to(key.dtype), angle.sin().to(key.dtype)
        rotated = rotate_half_split(query, cos[n_key - n_query :], sin[n_key - n_query :])
        return rotated, rotate_half_split(key, cos, sin)


class _Rotation(Positions):
    def __init__(self, rotary: RotaryAngles) -> None:
        super().__init__()
        self.rotary = rotary

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = self.rotary.rotate(query, key)
        return attend_causal(query, key, value, query.shape[-1] ** -0.5)


@ENCODINGS.register("rope", aliases=("rotary",))
@dataclass(frozen=True)
class Rope(Encoding):
    """Rotate pairs of channels of queries and keys by angles that grow with the position.

    A score depends on the distance of query and key only. ``interpolation`` and ``ntk`` are for sequences longer than
    those of training: interpolation divides all positions, the NTK factor lengthens mostly the long wavelengths.

    Source: Su et al. (2021), RoFormer, section 3.4.2, https://arxiv.org/abs/2104.09864. Interpolation: Chen et al.
        (2023), https://arxiv.org/abs/2306.15595. NTK factor: Peng et al. (2023), YaRN, section 3.1,
        https://arxiv.org/abs/2309.00071
    Formula: score_mn = (R_m q_m) (R_n k_n) / sqrt(D), R_t rotating pair i by
        (t / interpolation) (base ntk^(D / (D - 2)))^(-2i / D).
    Differs from the paper: channel i is paired with channel i + D / 2, as in Llama.
    Cost: fused SDPA. Decoding rotates all keys of the cache again in every step.
    Limits: the NTK factor needs heads of at least 4 channels.

    Args:
        base: Of the wavelengths, above 1.
        interpolation: Divisor of positions, 0.01 to 1000.
        ntk: Factor of context, 1 to 1000.
    """

    name = "rope"

    base: Annotated[float, Number(1, 1e9, exclusive_min=True)] = 10000.0
    interpolation: Annotated[float, Number(0.01, 1000)] = 1.0
    ntk: Annotated[float, Number(1, 1000)] = 1.0

    def build(self, shape: DecoderShape) -> Positions:
        """Return a module without parameters.

        Raises:
            ConfigError: there is an NTK factor, and a head has two channels.
        """
        if self.ntk != 1 and shape.head_dim < 4:
            raise ConfigError(f"rope: ntk={self.ntk} needs heads of at least 4 channels, these have {shape.head_dim}")
        return _Rotation(RotaryAngles(self.base, self.interpolation, self.ntk))
