"""Checks, on the loaded model itself, that the attention hook computes what the model computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.forward_context import ForwardContext, Overrides, active
from rag_posfix.patching.install import ATTENTION_NAME
from rag_posfix.patching.placement import main_device
from rag_posfix.patching.spec import ModelSpec
from rag_posfix.plan.model_shape import Capability

__all__ = ["Verification", "verify"]

PROBE_TOKENS = 32
# Largest difference between native logits and those through the hook, as a share of the spread of the logits. The hook
# runs the same kernels on the same numbers, so it is 0 on every supported family; a wrong rotation is off by 1e-3.
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True, slots=True)
class Verification:
    """What the check found.

    Attributes:
        idle_difference: Largest logit difference, native against the idle hook; 0 on a sound model.
        rotation_difference: The same with the rotation done in the hook; None where the model does not offer it.
    """

    idle_difference: float
    rotation_difference: float | None

    @property
    def max_logit_difference(self) -> float:
        """The larger of the two."""
        return max(self.idle_difference, self.rotation_difference or 0.0)


@torch.inference_mode()
def verify(model: Any, spec: ModelSpec) -> Verification:
    """Compare the logits of a short prompt with and without the attention hook. Not for a model that is serving.

    Raises:
        UnsupportedModelError: they differ by more than rounding, or the stock model computes no finite logits.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, PROBE_TOKENS), generator=generator).to(main_device(model))
    idle = _logits(model, ids)
    model.set_attn_implementation("sdpa")
    try:
        native = _logits(model, ids)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    if not bool(native.isfinite().all()):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes logits that are not finite, also without the attention hook: weights "
            "are damaged, or overflow in this dtype; load them again, or in another dtype"
        )
    rotated = None
    if Capability.ROTATION in spec.shape.capabilities:
        positions = torch.arange(PROBE_TOKENS, device=ids.device, dtype=torch.float32)[None]
        with active(ForwardContext(Overrides(head_scale=_undivided), positions, spec)):
            rotated = _logits(model, ids)
    found = Verification(
        idle_difference=_difference(idle, native),
        rotation_difference=None if rotated is None else _difference(rotated, native),
    )
    allowed = TOLERANCE.get(native.dtype, 1e-5) * float(native.float().std())
    if not found.max_logit_difference <= allowed:  # NaN differs too
        raise UnsupportedModelError(
            f"{type(model).__name__} differs from native by {found.max_logit_difference:.1e} with the attention hook "
            f"(allowed: {allowed:.1e}); it cannot be patched safely"
        )
    return found


def _undivided(layer: int, query: Tensor, key: Tensor) -> None:
    """Divide no head's positions: the hook rotates, as the model would."""


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=True).logits
    return logits


def _difference(left: Tensor, right: Tensor) -> float:
    return float((left.float() - right.float()).abs().max())
