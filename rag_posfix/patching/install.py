"""Installs the attention hook on a model, once, at load."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.attention_hook import before_attention, hooked_attention, hooked_mask
from rag_posfix.patching.families import family_of, shape_of
from rag_posfix.patching.placement import shape_as_placed
from rag_posfix.patching.ranks import Ranks
from rag_posfix.patching.rotation import scaled_base_angles
from rag_posfix.patching.spec import ModelSpec

__all__ = ["ATTENTION_NAME", "install", "stock_copy"]

ATTENTION_NAME = "rag_posfix"


def install(model: Any, ranks: Ranks | None = None) -> ModelSpec:
    """Route a model's attention through the attention hook and return what is known of the model.

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
            f"{type(model).__name__} has no model.rotary_emb and model.layers[i].self_attn; the attention hook "
            "needs a decoder with one rotary module and one attention module per layer"
        )
    if config._attn_implementation == ATTENTION_NAME:
        raise UnsupportedModelError(f"{type(model).__name__} has the attention hook already; install it once, at load")
    AttentionInterface.register(ATTENTION_NAME, hooked_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, hooked_mask)  # without it, causality and padding would be lost
    model.set_attn_implementation(ATTENTION_NAME)
    forward = type(rotary).forward

    def angles(states: Tensor, positions: Tensor, base_factor: float | None) -> tuple[Tensor, Tensor]:
        if base_factor is not None and base_factor != 1.0:
            return scaled_base_angles(rotary, states, positions, base_factor)
        cos, sin = forward(rotary, states, positions)
        return cos, sin

    return ModelSpec(
        family=family,
        shape=shape_as_placed(shape_of(config, family), model, modules),
        angles=angles,
        handles=tuple(module.register_forward_pre_hook(before_attention, with_kwargs=True) for module in modules),
        ranks=ranks or Ranks(),
    )


def stock_copy(model: Any, spec: ModelSpec) -> Any:
    """Return a second model over the same weights without the attention hook: for comparing in one process.

    Args:
        model: A model with the attention hook; it stays as it is.
        spec: What ``install`` returned for it.
    """
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    stock = copy.deepcopy(model, shared)
    handles = {handle.id for handle in spec.handles}
    for module in stock.modules():
        for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs):
            for number in handles.intersection(hooks):
                del hooks[number]
    stock.set_attn_implementation("sdpa")
    return stock
