"""Tensors of a plan on the devices that use them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def per_device(tensor: Tensor) -> Callable[[torch.device], Tensor]:
    """Return a function that gives ``tensor`` on a device. It is copied to each device once, not at every token."""
    return functools.cache(lambda device: tensor.to(device))
