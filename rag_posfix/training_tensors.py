"""The tensors of a checkpoint of training: weights and the states of Adam by one flat name each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def flattened(weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return weights as ``model.NAME`` and the states of an optimizer as ``adam.INDEX.NAME``, on the CPU."""
    import torch

    tensors = {f"model.{name}": weight for name, weight in weights.items()}
    for index, states in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{name}": torch.as_tensor(state) for name, state in states.items()}
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}


def separated(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    """Return the weights, and the states by index, from the tensors of ``flattened``."""
    weights: dict[str, Tensor] = {}
    states: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        kind, _, path = name.partition(".")
        if kind == "model":
            weights[path] = tensor
        else:
            index, _, key = path.partition(".")
            states.setdefault(int(index), {})[key] = tensor
    return weights, states
