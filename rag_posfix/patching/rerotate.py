"""Moves keys that are rotated already to other positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rag_posfix.attention.rope import add_rotation
from rag_posfix.patching.rotation import LayerRotation, uses_rope
from rag_posfix.patching.spec import ModelSpec

__all__ = ["rerotate"]


def rerotate(model: Any, spec: ModelSpec, keys: Tensor, offset: float) -> Tensor:
    """Return keys of all layers as if each token stood ``offset`` positions further on.

    Formula: R_(m + offset) x = R_offset R_m x in each layer that rotates; what YaRN scales stays scaled once.

    Shapes:
        keys: (L, Hkv, T, D), rotated to their positions. returns: the same.
    """
    if not offset:
        return keys
    at = torch.tensor([[offset]], dtype=torch.float32, device=keys.device)
    moved = torch.empty_like(keys)
    for number, layer in enumerate(model.model.layers):
        rotation = LayerRotation(spec, rotates=uses_rope(layer.self_attn))
        moved[number] = add_rotation(keys[number][None], rotation.phases(at))[0]
    return moved
