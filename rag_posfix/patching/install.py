"""Puts the seam on a model, once, at load."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.families import family_of, shape_of
from rag_posfix.patching.ranks import Ranks
from rag_posfix.patching.rotation import scaled_base_angles
from rag_posfix.patching.seam import before_attention, seam_attention, seam_mask
from rag_posfix.patching.spec import ModelSpec

__all__ = ["SEAM", "install", "stock_twin", "uninstall"]

SEAM = "rag_posfix"


def install(model: Any, ranks: Ranks | None = None) -> ModelSpec:
    """Route a model's attention through the seam and return what is known of it.

    Idle, the model computes bit for bit what it computed before with ``sdpa`` attention. No class is subclassed,
    copied or monkey-patched: the attention and mask functions are registered under one name (that of this library)
    and chosen for this model alone, and one hook is put in front of each of its attention modules.

    Args:
        model: A causal language model of transformers.
        ranks: The processes that it is split over; None if it is whole.

    Raises:
        UnsupportedModelError: the family is unknown, or the model is built in an unexpected way.
    """
    config = model.config.get_text_config()
    family = family_of(config)
    decoder = getattr(model, "model", None)
    rotary = getattr(decoder, "rotary_emb", None)
    modules: list[Any] = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", ())]
    if rotary is None or not modules or None in modules:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no model.rotary_emb and model.layers[i].self_attn; the seam needs a decoder "
            "with one rotary module and one attention module per layer"
        )
    if config._attn_implementation == SEAM:
        raise UnsupportedModelError(f"{type(model).__name__} carries the seam already; install it once, at load")
    AttentionInterface.register(SEAM, seam_attention)
    AttentionMaskInterface.register(SEAM, seam_mask)  # without it, causality and padding would be lost
    model.set_attn_implementation(SEAM)
    forward = type(rotary).forward

    def angles(states: Tensor, positions: Tensor, base_factor: float | None) -> tuple[Tensor, Tensor]:
        if base_factor is not None and base_factor != 1.0:
            return scaled_base_angles(rotary, states, positions, base_factor)
        cos, sin = forward(rotary, states, positions)
        return cos, sin

    return ModelSpec(
        family=family,
        shape=shape_of(config, family),
        angles=angles,
        handles=tuple(module.register_forward_pre_hook(before_attention, with_kwargs=True) for module in modules),
        ranks=ranks or Ranks(),
    )


def uninstall(model: Any, spec: ModelSpec) -> None:
    """Take the seam off a model again: ``sdpa`` attention, no hook."""
    for handle in spec.handles:
        handle.remove()
    model.set_attn_implementation("sdpa")


def stock_twin(model: Any, spec: ModelSpec) -> Any:
    """Return a second model over the same weights that never had the seam: for comparing in one process.

    Args:
        model: A model that carries the seam; it stays as it is.
        spec: What ``install`` returned for it.
    """
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, shared)
    handles = {handle.id for handle in spec.handles}
    for module in twin.modules():
        for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs):
            for number in handles.intersection(hooks):
                del hooks[number]
    twin.set_attn_implementation("sdpa")
    return twin
