"""The attention override of a plan: what replaces softmax(QK^T)V. It never sees a module or a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Rotation(Protocol):
    """A layer's own rotation, with whatever else the plan does to positions. The identity in layers without RoPE.

    Positions are (B | 1, T), or (B | 1, h, T) where they differ between heads; h is 1, Hkv or Hq.
    """

    def __call__(self, states: Tensor, positions: Tensor) -> Tensor:
        """Return states (B, H, T, D) rotated to positions."""

    def phases(self, positions: Tensor) -> Tensor:
        """Return what each pair of channels is multiplied by as a complex number, (B | 1, h, T, pairs) complex64.

        No pairs in layers without RoPE. The modulus is what the model scales rotated vectors by, 1 for most.
        """


class Rotated(Enum):
    """What an ``AttentionOverride`` gets rotated to its position. Keys that it gets rotated are cached rotated."""

    BOTH = "queries and keys"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInput:
    """One layer's attention in one forward pass.

    Shapes:
        query: (B, Hq, Tq, D), the newest tokens. key, value: (B, Hkv, Tk, D), all tokens so far.
        positions: (B | 1, Tk) float32, the plan's positions of all tokens so far.

    Attributes:
        scaling: What scores are multiplied by.
        layer: Which layer, from 0.
        rotate: Rotates states to positions.
        plain: Returns what the model would compute with queries and keys rotated to ``positions``, (B, Hq, Tq, D).
        observed: Whether anybody asks what the newest query attends to; if not, None is as good an answer as any.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    scaling: float
    layer: int
    rotate: Rotation
    plain: Callable[[], Tensor]
    observed: bool = True

    @property
    def start(self) -> int:
        """The index of the first query among the keys."""
        return self.key.shape[2] - self.query.shape[2]


class AttentionOverride(ABC):
    """Replaces softmax(QK^T)V in one row of a plan; the batch size is 1.

    Attributes:
        rotated: What arrives rotated.
        needs_mask: Whether ``plain`` is called for more than one query, so that the model's mask must be built. Leave
            it off where it can be: a mask is a T x T tensor.
        differentiable: Whether gradients flow through it exactly, so that a model can be trained under it.
        layers: In which layers; None = all.
        plain_from: Queries from this index on attend as the model was trained to; None = none do. Decoding is then
            that of the unmodified model.
    """

    rotated: ClassVar[Rotated] = Rotated.BOTH
    needs_mask: ClassVar[bool] = False
    differentiable: ClassVar[bool] = False
    layers: range | None = None
    plain_from: int | None = None

    @abstractmethod
    def __call__(self, given: AttentionInput) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, Hq, Tq, D) and what the newest query attends to.

        The second is (B, Tk) float32, the attention of the newest query averaged over heads, each row summing to 1;
        None where that is the ordinary attention of the newest query at its own position, or is not asked for.
        """

    def on(self, device: torch.device) -> AttentionOverride:
        """Return the same with its tensors on a device: a copy in each layer and step would wait for the device."""
        return self

    def visible(self, n_tokens: int) -> Tensor | None:
        """Return which token sees which in a prompt, (T, T) bool, for pictures and tests; None = causal."""
        return None
