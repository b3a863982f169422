"""Installs the attention hook on a model, once, at load."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.attention_hook import (
    before_attention,
    eager_attention_of,
    hooked_attention,
    hooked_eager_attention,
    hooked_eager_mask,
    hooked_mask,
)
from rag_posfix.patching.families import (
    decoder_of,
    family_of,
    original_window_of,
    rope_type_of,
    shape_as_placed,
    shape_of,
    shape_within,
)
from rag_posfix.patching.forward_context import current
from rag_posfix.patching.rotation import angle_layout, scaled_base_angles
from rag_posfix.patching.spec import ModelSpec, Ranks
from rag_posfix.patching.structure import Structure

ATTENTION_NAME = "rag_posfix"
HOOKED: Mapping[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "sdpa": (ATTENTION_NAME, hooked_attention, hooked_mask),
    "eager": (f"{ATTENTION_NAME}_eager", hooked_eager_attention, hooked_eager_mask),
}
"""Stock attention -> name, attention function and mask function of the hook in its place."""


def install(model: Any, ranks: Ranks | None = None, structure: Structure | None = None) -> ModelSpec:
    """Route a model's attention through the attention hook and return what is known of the model.

    Idle, the model computes bit for bit what it computed before with ``sdpa`` attention, or with ``eager`` where its
    family is not listed and has no other. No class is subclassed,
    copied or monkey-patched: the attention and mask functions are registered under one name (that of this library)
    and chosen for this model alone, and one hook is put in front of each of its attention modules.

    LongRoPE and dynamic NTK scaling write frequencies on the rotary module that all threads share, by the last
    position of each pass. Here the module keeps the frequencies of the original window, and ``ModelSpec.extended`` has
    those beyond it. Idle, the model computes what it computed before within the original window only.

    Args:
        structure: What was read from a model whose family is not in the table.

    Raises:
        UnsupportedModelError: the family is unknown, or the model is built in an unexpected way.
    """
    config = model.config.get_text_config(decoder=True)
    family = family_of(config) if structure is None else structure.family
    decoder = decoder_of(model)
    rotary = getattr(decoder, "rotary_emb", None)
    modules: list[Any] = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", ())]
    if rotary is None or not modules or None in modules:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no model.rotary_emb and model.layers[i].self_attn; the attention hook "
            "needs a decoder with one rotary module and one attention module per layer"
        )
    stock = config._attn_implementation
    if stock.startswith(ATTENTION_NAME):
        raise UnsupportedModelError(f"{type(model).__name__} has the attention hook already; install it once, at load")
    if rope_type_of(config) in ("dynamic", "longrope"):
        rotary.inv_freq.copy_(rotary.original_inv_freq)
        rotary.rope_type = "default"  # what transformers looks at before it writes other frequencies
    if structure is None or stock not in HOOKED:
        stock = "sdpa"
    if stock == "eager":
        for module in modules:
            eager_attention_of(module)  # raises where there is none
    name, attention, mask = HOOKED[stock]
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)  # without it, causality and padding would be lost
    model.set_attn_implementation(name)
    spec = ModelSpec(
        family=family,
        shape=shape_as_placed(shape_of(config, family), model, modules),
        angles=_angles_of(rotary),
        handles=tuple(module.register_forward_pre_hook(before_attention, with_kwargs=True) for module in modules),
        ranks=ranks or Ranks(),
        unrotated=_unrotated(modules) if structure is None else structure.unrotated,
        is_listed=structure is None,
        attention=stock,
    )
    if (within := shape_within(config, family)) is not None:
        spec = replace(spec, within=replace(spec, shape=shape_as_placed(within, model, modules)))
    window = original_window_of(config)
    return spec if window is None else _add_extended(spec, rotary, config, window)


def uninstall(model: Any, spec: ModelSpec, implementation: str) -> None:
    """Take the attention hook off a model and give it back its attention."""
    for handle in spec.handles:
        handle.remove()
    model.set_attn_implementation(implementation)


def _unrotated(modules: Sequence[Any]) -> frozenset[int]:
    """Return the layers without RoPE of a listed family: SmolLM3 leaves every fourth layer unrotated."""
    return frozenset(index for index, module in enumerate(modules) if not getattr(module, "use_rope", True))


def _angles_of(rotary: Any) -> Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]:
    """Return ``ModelSpec.angles`` by a rotary module."""
    forward = type(rotary).forward
    layout = angle_layout(rotary)

    def angles(states: Tensor, positions: Tensor, base_factor: float | None = None) -> tuple[Tensor, Tensor]:
        if base_factor is not None and base_factor != 1.0:
            return scaled_base_angles(rotary, states, positions, base_factor, layout)
        cos, sin = forward(rotary, states, positions)
        return cos, sin

    return angles


def new_rotary(rotary: Any, config: Any) -> Any:
    """Return a rotary module as stock code makes it from the configuration."""
    return type(rotary)(config).to(next(rotary.buffers()))


def _add_extended(spec: ModelSpec, rotary: Any, config: Any, window: int) -> ModelSpec:
    """Return the spec of a model with LongRoPE: contexts with ``extended`` rotate by the long frequencies."""
    long = new_rotary(rotary, config)
    long(torch.zeros(1, device=long.inv_freq.device), torch.tensor([[window]], device=long.inv_freq.device))
    long.rope_type = "default"
    extended = replace(spec, angles=_angles_of(long))

    def select_frequencies(_: Any, arguments: tuple[Any, ...], options: dict[str, Any], original: Any) -> Any:
        context = current()
        if context is None:
            return original
        contexts = context.by_rows(original[0].shape[0])
        if not any(row_context.spec is extended for _, row_context in contexts):
            return original
        extended_angles = type(long).forward(long, *arguments, **options)
        chosen = [
            (extended_angles if row_context.spec is extended else original, rows) for rows, row_context in contexts
        ]
        return tuple(torch.cat([angles[i][rows] for angles, rows in chosen]) for i in (0, 1))

    handle = rotary.register_forward_hook(select_frequencies, with_kwargs=True)
    return replace(spec, handles=(*spec.handles, handle), original_window=window, extended=extended)


def copy_over_weights(model: Any) -> Any:
    """Return a copy of a model, hooks included, that shares all modules without modules inside: the weights."""
    leaves = (module for module in model.modules() if next(module.children(), None) is None)
    return copy.deepcopy(model, {id(each): each for each in chain(model.parameters(), model.buffers(), leaves)})


def stock_copy(model: Any, spec: ModelSpec) -> Any:
    """Return a second model over the same weights without the attention hook: for comparing in one process.

    Its rotary module is made anew from the configuration.
    """
    stock = copy_over_weights(model)
    if spec.plain is not None:
        return stock
    decoder = decoder_of(stock)
    decoder.rotary_emb = new_rotary(decoder.rotary_emb, stock.config.get_text_config(decoder=True))
    handles = {handle.id for handle in spec.handles}
    for module in stock.modules():
        for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs):
            for number in handles.intersection(hooks):
                del hooks[number]
    stock.set_attn_implementation(spec.attention)
    return stock
