"""The table of model families: how each rotates, and what configuration and placement let a plan change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.spec import Family
from rag_posfix.plan.plan import Capability, ModelShape

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "half", linear=True),
        Family("mistral", "half", linear=True),
        Family("qwen2", "half", linear=True),
        Family("qwen3", "half", linear=False),
        Family("phi3", "half", linear=True),
        Family("gemma", "half", linear=True),
        Family("gemma3_text", "half", linear=False, one_base=False),
        Family("granite", "half", linear=True),
        Family("smollm3", "half", linear=True),
        Family("olmo2", "half", linear=False),
        Family("cohere", "interleaved", linear=False),
        Family("glm4", "interleaved", linear=True),
    )
}


_ABSOLUTE = "it adds positions to its input and rotates nothing"
_ALIBI = "it has ALiBi biases instead of rotary positions"
_RECURRENT = "it has no attention that keeps keys"
_HYBRID = "some of its layers are recurrent and keep no keys"
_LAYOUT = "its attention modules are not at model.layers[i].self_attn"

UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("biogpt", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "xglm"), _ABSOLUTE),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "lfm2", "qwen3_next", "recurrent_gemma", "zamba2"), _HYBRID),
    **dict.fromkeys(("falcon", "gpt_neox"), _LAYOUT),
    **dict.fromkeys(
        ("codegen", "gptj"), "it rotates inside of its attention modules, out of reach of the attention hook"
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "it rotates a part of each key that is kept apart from the rest"),
}
"""Why model types have no attention hook. Types in neither table are read from the model itself (``structure``)."""


def family_of(config: Any) -> Family:
    """Return the family of a model by its configuration.

    Raises:
        UnsupportedModelError: the family is not in the table; the message says why, where that is known.
    """
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        reason = UNSUPPORTED.get(str(model_type))
        because = f": {reason}" if reason else ", nobody has checked it"
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported{because}; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def rope_type_of(config: Any) -> str:
    """Return the kind of rotary encoding; ``default`` too where each kind of layer has its own."""
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def original_window_of(config: Any) -> int | None:
    """Return the most positions that LongRoPE reads with its first set of frequencies; None for other models."""
    if rope_type_of(config) != "longrope":
        return None
    window: int = config.rope_parameters["original_max_position_embeddings"]
    return window if window < config.max_position_embeddings else None


def keeps_all_keys(config: Any) -> bool:
    """Return whether every layer keeps the keys of all tokens that the context window holds.

    A sliding window as long as the context window drops none.
    """
    sliding_window = getattr(config, "sliding_window", None)
    if sliding_window is not None and sliding_window >= config.max_position_embeddings:
        sliding_window = None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return sliding_window is None
    keeping = {"full_attention"} if sliding_window is not None else {"full_attention", "sliding_attention"}
    return keeping.issuperset(layer_types)


def decoder_of(model: Any) -> Any:
    """Return the module with the layers: ``model.model``, or one level deeper in multimodal wrappers; None without."""
    decoder = getattr(model, "model", None)
    return getattr(decoder, "language_model", decoder)


def shape_of(config: Any, family: Family) -> ModelShape:
    """Return sizes and capabilities of a model by its configuration."""
    heads = config.num_attention_heads
    lacks = _lacks(config, family, keeps_all=keeps_all_keys(config))
    return ModelShape(
        n_layers=config.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        context_window=config.max_position_embeddings,
        capabilities=frozenset(Capability) - lacks.keys(),
        lacks=lacks,
    )


LEAST_WINDOW = 16
"""Sliding windows of fewer tokens hold no prompt."""


def window_of(config: Any) -> int | None:
    """Return the tokens that layers with sliding windows keep, or those of the first chunk of layers with chunks."""
    is_chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    window: int | None = getattr(config, "attention_chunk_size" if is_chunked else "sliding_window", None)
    return window


def _scales_by_place(config: Any) -> bool:
    """Return whether layers without rotation scale queries by the number of tokens before them (Llama 4)."""
    return bool(getattr(config, "attn_temperature_tuning", False))


def shape_within(config: Any, family: Family) -> ModelShape | None:
    """Return the shape for calls that fit the windows, or the first chunk: the layers then keep all keys."""
    window, kinds = window_of(config), getattr(config, "layer_types", None) or ()
    if keeps_all_keys(config) or not window or window < LEAST_WINDOW:
        return None
    if not {"full_attention", "sliding_attention", "chunked_attention"}.issuperset(kinds):
        return None
    if _scales_by_place(config):  # padding in front of shorter rows moves their places
        window = min(window, int(config.floor_scale) - 1)
    lacks = _lacks(config, family, keeps_all=True)
    return replace(
        shape_of(config, family),
        context_window=window,
        capabilities=frozenset(Capability) - lacks.keys(),
        lacks=lacks,
    )


def _lacks(config: Any, family: Family, *, keeps_all: bool) -> dict[Capability, str]:
    """Return what a plan may not change, and why."""
    name = family.model_type
    lacks: dict[Capability, str] = {}
    if not keeps_all:
        kind = "chunked" if "chunked_attention" in (getattr(config, "layer_types", None) or ()) else "sliding-window"
        lacks[Capability.FULL_CACHE] = f"{name} has {kind} layers, whose caches drop keys"
        lacks[Capability.ROTATION] = lacks[Capability.FULL_CACHE]
    if not family.softmax:
        lacks[Capability.SOFTMAX] = (
            f"{name} caps its attention scores or has sinks, and the method's own attention does not"
        )
    if family.rotation != "half":
        pairs = "pairs neighbouring channels" if family.rotation == "interleaved" else "pairs channels in its own way"
        lacks[Capability.ROTATION] = f"{name} {pairs} when it rotates, the hook first with second half"
    if not family.one_base:
        lacks[Capability.ANGLES] = f"{name} rotates by two sets of angles, one for each kind of layer"
        lacks[Capability.ROTATION] = lacks[Capability.ANGLES]
    if _scales_by_place(config):
        lacks[Capability.POSITIONS] = f"{name} scales queries by their place in the cache, whatever their positions"
    if family.complex_angles:
        lacks[Capability.ANGLES] = f"{name} rotates by complex numbers, the hook by cosines and sines"
        lacks[Capability.ROTATION] = lacks[Capability.ANGLES]
    if Capability.ROTATION in lacks:
        lacks[Capability.HIDDEN_CHANNEL] = lacks[Capability.ROTATION]
    elif not family.linear:
        lacks[Capability.HIDDEN_CHANNEL] = f"{name} normalises queries and keys, so that they are not linear in it"
    return lacks


_NOT_COMPUTED_ON = ("cpu", "disk", "meta")


def devices_of(model: Any) -> tuple[str, ...]:
    """Return where the weights of a model with a device map are, sorted; none if it has no such map."""
    placed = getattr(model, "hf_device_map", None) or {}
    return tuple(sorted({str(device) for device in placed.values()}))


def main_device(model: Any) -> torch.device:
    """Return the device for token ids: the device on which the first weights compute."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    computing = [name for name in devices_of(model) if name not in _NOT_COMPUTED_ON]
    name = computing[0] if computing else "cpu"
    return torch.device("cuda", int(name)) if name.isdigit() else torch.device(name)


def shape_as_placed(shape: ModelShape, model: Any, modules: Sequence[Any]) -> ModelShape:
    """Return the shape without what the loaded weights do not allow, each with the reason."""
    lacks: dict[Capability, str] = {}
    devices = devices_of(model)
    if len(devices) > 1:
        reason = f"its layers are on several devices ({', '.join(devices)}); load it on one"
        lacks.update(dict.fromkeys(frozenset(Capability) - {Capability.POSITIONS, Capability.SOFTMAX}, reason))
    elif Capability.HIDDEN_CHANNEL in shape.capabilities and not all(map(_has_plain_weights, modules)):
        lacks[Capability.HIDDEN_CHANNEL] = "its weights are quantised, and no channel can be read from them"
    return replace(shape, capabilities=shape.capabilities - lacks.keys(), lacks={**lacks, **shape.lacks})


def _has_plain_weights(module: Any) -> bool:
    """Return whether queries and keys are made by unquantised matrices; a shard (DTensor) counts as one."""
    projections = (getattr(module, name, None) for name in ("qkv_proj", "q_proj", "k_proj"))
    weights = [getattr(projection, "weight", None) for projection in projections if projection is not None]
    return bool(weights) and all(map(_is_plain, weights))


def _is_plain(weight: Any) -> bool:
    tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return type(tensor.data) is torch.Tensor and bool(tensor.is_floating_point())
