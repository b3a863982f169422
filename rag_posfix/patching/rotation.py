"""Rotation inside the attention hook: the model's own angles at the positions of a plan."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rag_posfix.attention.rope import add_rotation, rotate_half_split
from rag_posfix.patching.forward_context import Overrides
from rag_posfix.patching.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class LayerRotation:
    """Rotates states of one layer to given positions. A ``Rotation`` of ``attention.attend``.

    Attributes:
        spec: The model, whose angles are used.
        rotates: Whether the layer has RoPE.
        base_factor: Factor of the RoPE base.
        scale: Divisor of positions in this layer.
        ratios: (Hkv,) what positions are divided by in each key head and its group of query heads.
    """

    spec: ModelSpec
    rotates: bool = True
    base_factor: float | None = None
    scale: float | None = None
    ratios: Tensor | None = None

    def __call__(self, states: Tensor, positions: Tensor) -> Tensor:
        """Return (B, H, T, D) rotated; positions (B | 1, T) or (B | 1, h, T) with h in 1, Hkv, Hq."""
        if not self.rotates:
            return states
        cos, sin = self._per_head(states, positions, states.shape[1])
        return rotate_half_split(states, cos, sin).to(states.dtype)

    @property
    def name(self) -> Hashable:
        """Divisors of heads are those of one layer, which keeps them."""
        ratios = None if self.ratios is None else id(self.ratios)
        return (self.rotates, self.base_factor, None if self.scale is None else float(self.scale), ratios)

    def phases(self, positions: Tensor) -> Tensor:
        """Return cos + i sin of each pair of channels, (B | 1, h, T, pairs) complex64."""
        positions = positions if positions.dim() == 3 else positions[:, None]
        if not self.rotates:
            return torch.zeros((*positions.shape, 0), dtype=torch.complex64, device=positions.device)
        n_heads = positions.shape[1] if self.ratios is None else max(positions.shape[1], self.ratios.shape[0])
        cos, sin = self._per_head(positions, positions, n_heads)
        pairs = cos.shape[-1] // 2  # both halves hold the same angles
        return torch.complex(cos[..., :pairs].contiguous(), sin[..., :pairs].contiguous())

    def _per_head(self, states: Tensor, positions: Tensor, n_heads: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (B | 1, h, T, rotated) in the dtype of ``states``; the heads' own divisors count."""
        positions = positions if positions.dim() == 3 else positions[:, None]  # (B | 1, h, T)
        if 1 < positions.shape[1] < n_heads:
            positions = positions.repeat_interleave(n_heads // positions.shape[1], dim=1)
        if self.ratios is not None:
            positions = positions / self.ratios.repeat_interleave(n_heads // self.ratios.shape[0])[None, :, None]
        cos, sin = self.angles(states, positions.flatten(0, 1))
        return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)

    def angles(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (B, T, rotated), of positions (B, T) as this layer sees them."""
        if self.scale is not None:
            positions = positions / self.scale
        return self.spec.angles(states, positions, self.base_factor)


def layer_rotation(overrides: Overrides, spec: ModelSpec, module: Any) -> LayerRotation:
    """Return the rotation of one layer under overrides, heads left out."""
    scales = overrides.layer_scale
    return LayerRotation(
        spec=spec,
        rotates=module.layer_idx not in spec.unrotated,
        base_factor=overrides.rope_base_factor,
        scale=None if scales is None else scales[module.layer_idx],
    )


AngleLayout = Literal["halves", "neighbours", "single"]


def angle_layout(rotary: Any) -> AngleLayout:
    """Return how a rotary module lays out a pair's angle: in both halves, side by side (Cohere), once (gpt-oss)."""
    if not hasattr(rotary, "inv_freq"):  # frequencies by the kind of layer (Gemma 3): its base is not changed
        return "halves"
    position = torch.ones(1, 1, dtype=torch.long, device=rotary.inv_freq.device)
    angles = type(rotary).forward(rotary, rotary.inv_freq, position)
    if not isinstance(angles, tuple):  # complex numbers (Llama 4)
        return "single"
    _, sin = angles
    if sin.shape[-1] == rotary.inv_freq.shape[0]:
        return "single"
    return "neighbours" if torch.equal(sin[..., ::2], sin[..., 1::2]) else "halves"


def scaled_base_angles(
    rotary: Any, states: Tensor, positions: Tensor, factor: float, layout: AngleLayout
) -> tuple[Tensor, Tensor]:
    """Return cos and sin with the RoPE base multiplied by ``factor``.

    Formula: base^(-2i/d) -> (factor base)^(-2i/d) = base^(-2i/d) factor^(-2i/d): every one of the model's own inverse
        frequencies, whatever scaling made it, is multiplied by factor^(-i / (d / 2)).

    Shapes:
        positions: (B, T). returns: (B, T, d) each, (B, T, d / 2) for ``single``, in the dtype of ``states``.
    """
    frequencies = rotary.inv_freq.float()  # (d / 2,)
    exponent = torch.arange(frequencies.shape[0], device=frequencies.device) / frequencies.shape[0]
    angle = positions[..., None].float() * (frequencies * factor**-exponent)
    if layout == "halves":
        angle = torch.cat((angle, angle), dim=-1)
    elif layout == "neighbours":
        angle = torch.stack((angle, angle), dim=-1).flatten(-2)
    scaling = getattr(rotary, "attention_scaling", 1.0)
    return (angle.cos() * scaling).to(states.dtype), (angle.sin() * scaling).to(states.dtype)


CHUNK = 2**22
"""Numbers that are rotated at a time, in float32: few operations for short passages, little memory for long ones."""


def rerotate(spec: ModelSpec, keys: Tensor, offset: float) -> Tensor:
    """Return keys of all layers as if each token stood ``offset`` positions further on.

    Formula: R_(m + offset) x = R_offset R_m x in each layer that rotates; what YaRN scales stays scaled once.

    Shapes:
        keys: (L, Hkv, T, D), rotated to their positions. returns: the same.
    """
    if not offset:
        return keys
    phases = LayerRotation(spec).phases(torch.full((1, 1), float(offset), device=keys.device))
    n_layers = max(1, CHUNK // keys[0].numel())
    moved = torch.cat([add_rotation(chunk, phases) for chunk in torch.split(keys, n_layers)])
    for layer in spec.unrotated.intersection(range(len(keys))):
        moved[layer] = keys[layer]
    return moved
