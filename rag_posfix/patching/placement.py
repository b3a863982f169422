"""What a loaded model cannot offer because of how its weights are held: quantised, or on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rag_posfix.plan.model_shape import Capability, ModelShape

_NOT_COMPUTED_ON = ("cpu", "disk", "meta")


def devices_of(model: Any) -> tuple[str, ...]:
    """Return where the weights of a model with a device map are, sorted; none if it has no such map."""
    placed = getattr(model, "hf_device_map", None) or {}
    return tuple(sorted({str(device) for device in placed.values()}))


def main_device(model: Any) -> torch.device:
    """Return the device that token ids are given on: that of the first weights, wherever these wait meanwhile."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    computing = [name for name in devices_of(model) if name not in _NOT_COMPUTED_ON]
    name = computing[0] if computing else "cpu"
    return torch.device("cuda", int(name)) if name.isdigit() else torch.device(name)


def shape_as_placed(shape: ModelShape, model: Any, modules: Sequence[Any]) -> ModelShape:
    """Return the shape without what the loaded weights do not allow, each with the reason."""
    lacks: dict[Capability, str] = {}
    devices = devices_of(model)
    if len(devices) > 1:
        reason = f"its layers are on several devices ({', '.join(devices)}); load it on one"
        lacks.update(dict.fromkeys(frozenset(Capability) - {Capability.POSITIONS}, reason))
    elif Capability.HIDDEN_CHANNEL in shape.capabilities and not all(map(_has_plain_weights, modules)):
        lacks[Capability.HIDDEN_CHANNEL] = "its weights are quantised, and no channel can be read from them"
    return replace(shape, capabilities=shape.capabilities - lacks.keys(), lacks={**lacks, **shape.lacks})


def _has_plain_weights(module: Any) -> bool:
    """Return whether queries and keys are made by matrices of numbers; a part of one (a DTensor) is one too."""
    projections = (getattr(module, name, None) for name in ("qkv_proj", "q_proj", "k_proj"))
    weights = [getattr(projection, "weight", None) for projection in projections if projection is not None]
    return bool(weights) and all(map(_is_plain, weights))


def _is_plain(weight: Any) -> bool:
    tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return type(tensor.data) is torch.Tensor and bool(tensor.is_floating_point())
