"""Runs the same work on the CPU and on the device twin, in a process where ``device_twin.install`` was called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.patching.install import install as install_hook
from tests.support.device_twin import DEVICE, Counts, counted, install
from tests.support.tiny import stock_model
from tests.support.toy_encoder import ToyEncoder

TOLERANCE = 4e-6
"""Largest difference of log-probabilities in float32: sums are taken in another order."""


@dataclass(frozen=True)
class Readings:
    """What the same work returned on the CPU and on the twin, as plain numbers and text.

    Attributes:
        cpu: Result on the CPU.
        twin: Result on the twin.
        counts: What the host asked of the twin.
    """

    cpu: Any
    twin: Any
    counts: Counts

    @property
    def difference(self) -> float:
        """The largest difference between two numbers; infinite where anything else differs."""
        (left, left_spec), (right, right_spec) = tree_flatten(self.cpu), tree_flatten(self.twin)
        if left_spec != right_spec:
            return float("inf")
        return max((distance(*pair) for pair in zip(left, right, strict=True)), default=0.0)


def distance(left: Any, right: Any) -> float:
    if isinstance(left, float) and isinstance(right, float):
        return 0.0 if left == right or (left != left and right != right) else abs(left - right)
    return 0.0 if left == right else float("inf")


def start() -> None:
    """Prepare a process: one thread, and the twin."""
    torch.set_num_threads(1)
    install()


def read_on_both(action: Callable[..., Any], *arguments: Any) -> Readings:
    """Call ``action(device, *arguments)`` for the CPU and for the twin, and count on the twin."""
    cpu = action("cpu", *arguments)
    with counted() as counts:
        twin = action(DEVICE, *arguments)
    return Readings(tree_map(as_data, cpu), tree_map(as_data, twin), counts)


def as_data(value: Any) -> Any:
    return value.detach().cpu().tolist() if isinstance(value, torch.Tensor) else value


@functools.cache
def tiny_engine_on(device: str, family: str = "llama", layers: int = 3, window: int = 2048, **settings: Any) -> Engine:
    """Return an engine around a small random model that reads bytes; the same weights on every device."""
    model = stock_model(
        family, vocab_size=ToyEncoder.vocab_size, num_hidden_layers=layers, max_position_embeddings=window, **settings
    )
    spec = install_hook(model)
    return Engine(LoadedModel(model.to(device), spec), ToyEncoder(), "tiny", "print")
