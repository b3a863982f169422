"""Rotary position encoding: rotating vectors by given angles. Angles come from the model, never from here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def rotate_half_split(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``cos.shape[-1]`` channels of each vector, pairing channel i with channel i + half.

    Source: Su et al. (2021), RoFormer, section 3.4.2, https://arxiv.org/abs/2104.09864; the pairing is that of Llama
    (first half with second half), not the paper's (neighbours).
    Formula: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). Channels beyond the rotated ones (partial rotary) pass.

    Shapes:
        states: (B, H, T, D). cos, sin: broadcast to (B, H, T, rotated), in the dtype of ``states``.
    """
    n_rotated = cos.shape[-1]
    rotated, kept = states[..., :n_rotated], states[..., n_rotated:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, kept), dim=-1) if kept.shape[-1] else rotated


def add_rotation(states: Tensor, phases: Tensor) -> Tensor:
    """Rotate vectors that are rotated already by some more, without scaling them again.

    Formula: R_b (a R_m x) = a R_(m + b) x: rotations add up; the factor a that YaRN gives cos and sin stays as it is.

    Shapes:
        states: (B, H, T, D). phases: (B | 1, h, T | 1, pairs) complex, as ``Rotation.phases`` gives them, h one of 1,
        Hkv, H; no pairs where nothing rotates. returns: (B, H, T, D) in the dtype of ``states``, computed in float32.
    """
    if not phases.shape[-1]:
        return states
    phases = phases / phases.abs()
    if 1 < phases.shape[1] < states.shape[1]:  # the query heads of a group add_rotation like their key head
        phases = phases.repeat_interleave(states.shape[1] // phases.shape[1], dim=1)
    cos, sin = (torch.cat((part, part), dim=-1) for part in (phases.real, phases.imag))
    return rotate_half_split(states.float(), cos, sin).to(states.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ComplexPairs:
    """Vectors whose rotated channel pairs are complex numbers: rotating is multiplying, rotations add up.

    Formula: (x1, x2) -> z = x1 + i x2; rotated by the angle a: z e^(ia); by a and then b: z e^(ia) e^(ib).

    Shapes:
        pairs: (..., H, T, pairs) complex64. rest: (..., H, T, D - 2 pairs) float32, the channels that do not rotate.
    """

    pairs: Tensor
    rest: Tensor

    @classmethod
    def of(cls, states: Tensor, n_pairs: int) -> ComplexPairs:
        """Return (..., H, T, D) with its first 2 ``n_pairs`` channels paired as ``rotate_half_split`` pairs them."""
        states = states.float()
        first, second = states[..., :n_pairs], states[..., n_pairs : 2 * n_pairs]
        return cls(torch.complex(first, second), states[..., 2 * n_pairs :])

    def rotated(self, phases: Tensor) -> ComplexPairs:
        """Return the vectors rotated; ``phases`` broadcasts with (..., H, T, pairs)."""
        return ComplexPairs(self.pairs * phases, self.rest)

    def tokens(self, which: slice) -> ComplexPairs:
        """Return some of the tokens."""
        return ComplexPairs(self.pairs[..., which, :], self.rest[..., which, :])

    def grouped(self, groups: int) -> ComplexPairs:
        """Return the vectors with the head axis split in two, (..., H / groups, groups, T, D)."""
        return ComplexPairs(*(torch.unflatten(part, -3, (-1, groups)) for part in (self.pairs, self.rest)))

    def vectors(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return (..., H, T, D) real, channels reordered, all vectors' alike: scalar products stay what they were."""
        flat = torch.view_as_real(self.pairs).flatten(-2).to(dtype)
        if not self.rest.shape[-1]:
            return flat
        rest = self.rest.to(dtype).expand(*flat.shape[:-1], self.rest.shape[-1])
        return torch.cat((flat, rest), dim=-1)
