"""Puts the seam on a model, once, at load."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.families import family_of, shape_of
from rag_posfix.patching.seam import hold_rotation, seam_attention, seam_mask
from rag_posfix.patching.spec import ModelSpec

__all__ = ["SEAM", "install", "uninstall"]

SEAM = "rag_posfix"


def install(model: Any) -> ModelSpec:
    """Route a model's attention through the seam and return what is known of it.

    Idle, the model computes bit for bit what it computed before with ``sdpa`` attention. No class is subclassed,
    copied or monkey-patched: the attention and mask functions are registered under one name (that of this library)
    and chosen for this model alone, and one forward hook is put on its rotary module.

    Args:
        model: A causal language model of transformers.

    Raises:
        UnsupportedModelError: the family is unknown, or the model is built in an unexpected way.
    """
    config = model.config.get_text_config()
    family = family_of(config)
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    if rotary is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no model.rotary_emb; the seam needs a decoder with one rotary module"
        )
    if config._attn_implementation == SEAM:
        raise UnsupportedModelError(f"{type(model).__name__} carries the seam already; install it once, at load")
    AttentionInterface.register(SEAM, seam_attention)
    AttentionMaskInterface.register(SEAM, seam_mask)  # without it, causality and padding would be lost
    model.set_attn_implementation(SEAM)
    forward = type(rotary).forward

    def angles(states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        # The class's forward, not the module's call: the hook must not answer here.
        cos, sin = forward(rotary, states, positions)
        return cos, sin

    return ModelSpec(
        family=family,
        shape=shape_of(config, family),
        angles=angles,
        handle=rotary.register_forward_hook(hold_rotation),
    )


def uninstall(model: Any, spec: ModelSpec) -> None:
    """Take the seam off a model again: ``sdpa`` attention, no hook."""
    spec.handle.remove()
    model.set_attn_implementation("sdpa")
