"""What patching learned of a model. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from rag_posfix.patching.ranks import Ranks
from rag_posfix.plan.model_shape import ModelShape

Rotation = Literal["half", "interleaved"]


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of models handles positions.

    Attributes:
        model_type: ``config.model_type``.
        rotation: How it pairs channels when it rotates queries and keys.
        linear: Whether queries and keys are linear in the normalised hidden state: no norm of their own.
    """

    model_type: str
    rotation: Rotation
    linear: bool


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec:
    """A model with the attention hook.

    Attributes:
        family: Its row in the table of families.
        shape: Sizes and capabilities of the whole model, however many ranks it is split over.
        angles: (states, (B, T) positions, factor of the RoPE base or None) -> (cos, sin), each (B, T, rotated), from
            the model's own rotary module, in the dtype of ``states``.
        handles: The module hooks that were put on the model.
        ranks: The processes that the model is split over.
        original_window: The most positions that a call may have under ``angles``; None: as many as the context window.
        extended: The same model for calls with more positions: LongRoPE then rotates all of them by other
            frequencies.
    """

    family: Family
    shape: ModelShape
    angles: Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]
    handles: tuple[Any, ...]
    ranks: Ranks = field(default_factory=Ranks)
    original_window: int | None = None
    extended: ModelSpec | None = None
