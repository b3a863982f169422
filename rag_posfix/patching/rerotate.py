"""Moves keys that are rotated already to other positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rag_posfix.attention.rope import add_rotation
from rag_posfix.patching.rotation import LayerRotation, uses_rope
from rag_posfix.patching.spec import ModelSpec

CHUNK = 2**22
"""Numbers that are rotated at a time, in float32: few operations for short passages, little memory for long ones."""


def rerotate(model: Any, spec: ModelSpec, keys: Tensor, offset: float) -> Tensor:
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
    for number, layer in enumerate(model.model.layers):
        if not uses_rope(layer.self_attn):
            moved[number] = keys[number]
    return moved
