"""How an unlisted model rotates, read from its attention modules: what they compute from hidden states and angles.

The table of model families: how each rotates, and what configuration and placement let a plan change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rag_posfix.attention.rope import rotate_half_split
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.attention_hook import channel_columns
from rag_posfix.patching.spec import Family, Ranks, Rotation
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


MIN_WINDOW = 16
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
    if keeps_all_keys(config) or not window or window < MIN_WINDOW:
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


_NAME = "rag_posfix_structure"
_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Structure:
    """What was read: the family, and the layers that rotate nothing."""

    family: Family
    unrotated: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Reading:
    """What was read of one kind of layer; names as in ``Family``."""

    rotates: bool
    rotation: Rotation
    linear: bool
    softmax: bool


class _Captured(Exception):
    """Ends an attention module with its queries and keys."""

    def __init__(self, query: Tensor, key: Tensor, options: dict[str, Any]) -> None:
        super().__init__()
        self.query, self.key, self.options = query, key, options


class _Inputs(Exception):
    """Ends a model with the arguments of its first attention module."""


@torch.inference_mode()
def read_structure(model: Any) -> Structure:
    """Return how a model rotates, each kind of layer once; what it computes is left as it was.

    Cost: the attention projections of one layer of each kind, over three tokens, five times.

    Raises:
        UnsupportedModelError: its attention is not what the attention hook needs; the message says what is missing.
    """
    config = model.config.get_text_config(decoder=True)
    implementation = config._attn_implementation
    AttentionInterface.register(_NAME, _capture)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    try:
        return _read(model, config)
    except UnsupportedModelError:
        raise
    except Exception as error:  # modules of any kind, called as those of the families are called
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UnsupportedModelError(f"its attention cannot be called on its own: {reason}") from error
    finally:
        model.set_attn_implementation(implementation)


def _capture(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> Any:
    raise _Captured(query, key, options)


def _read(model: Any, config: Any) -> Structure:
    decoder = decoder_of(model)
    layers = list(getattr(decoder, "layers", None) or ())
    modules = [getattr(layer, "self_attn", None) for layer in layers]
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None or not modules or None in modules:
        raise UnsupportedModelError("not every layer has a self_attn that is given angles by one rotary module")
    if any(getattr(each, "layer_idx", None) != i or not hasattr(each, "head_dim") for i, each in enumerate(modules)):
        raise UnsupportedModelError("its attention modules name no layer, or no one size of their heads")
    types: Sequence[Any] = getattr(config, "layer_types", None) or [None] * len(modules)
    arguments = _arguments(model, modules[0])
    kinds: dict[Any, _Reading] = {}
    unrotated = set()
    for index, module in enumerate(modules):
        kind = (types[index], *_settings(module))
        if kind not in kinds:
            kinds[kind] = _read_module(module, arguments, config)
        if not kinds[kind].rotates:
            unrotated.add(index)
    rotations = {reading.rotation for reading in kinds.values() if reading.rotates}
    if not rotations:
        raise UnsupportedModelError("none of its layers rotates queries and keys")
    family = Family(
        config.model_type,
        rotations.pop() if len(rotations) == 1 else "other",
        linear=all(reading.linear for reading in kinds.values()),
        one_base=hasattr(rotary, "inv_freq"),
        softmax=all(reading.softmax for reading in kinds.values()),
        complex_angles=_has_complex_angles(arguments),
    )
    return Structure(family, frozenset(unrotated))


def _settings(module: Any) -> tuple[Any, ...]:
    """Return a module's own settings, the number of its layer left out: modules with equal ones compute alike."""
    simple = {name: v for name, v in vars(module).items() if isinstance(v, bool | int | float | str) or v is None}
    simple.pop("layer_idx")
    return (type(module), *sorted(simple.items(), key=lambda item: item[0]))


def _arguments(model: Any, module: Any) -> dict[str, Any]:
    """Return what the model calls its first attention module with."""
    seen: dict[str, Any] = {}

    def record(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen.update(options)
        if not arguments and {"hidden_states", "position_embeddings"} <= options.keys():
            raise _Inputs
        raise UnsupportedModelError("its attention modules do not get hidden_states and position_embeddings by name")

    handle = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        ids = torch.arange(5, 5 + _TOKENS, device=model.get_input_embeddings().weight.device)[None]
        model(input_ids=ids, use_cache=False)
    except _Inputs:
        pass
    finally:
        handle.remove()
    return seen


def _has_complex_angles(arguments: dict[str, Any]) -> bool:
    angles = arguments["position_embeddings"]
    return isinstance(angles, Tensor) and angles.is_complex()


def _read_module(module: Any, arguments: dict[str, Any], config: Any) -> _Reading:
    """Return whether a module rotates and how, whether queries and keys are linear in its input, and its softmax."""
    states, embeddings = arguments["hidden_states"], arguments["position_embeddings"]
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(states.shape, generator=generator).to(states)
    if is_complex := _has_complex_angles(arguments):
        angle = torch.rand(embeddings.shape, generator=generator)
        half = neighbours = angle
    else:
        cos, sin = embeddings
        angle = torch.rand(cos[..., : cos.shape[-1] // 2].shape, generator=generator)
        half, neighbours = torch.cat((angle, angle), dim=-1), angle.repeat_interleave(2, dim=-1)
    nothing = torch.zeros_like(half)

    def run(hidden: Tensor, angles: Tensor) -> _Captured:
        if is_complex:
            given: Any = torch.polar(torch.ones_like(angles), angles).to(embeddings)
        else:
            given = (angles.cos().to(cos), angles.sin().to(sin))
        try:
            module(**{**arguments, "hidden_states": hidden, "position_embeddings": given, "past_key_values": None})
        except _Captured as captured:
            return captured
        raise UnsupportedModelError("its attention does not go through transformers' attention functions")

    plain = run(states, nothing)
    softmax = all(plain.options.get(option) is None for option in ("softcap", "s_aux"))
    if plain.query.shape[-1] != module.head_dim:
        raise UnsupportedModelError("its keys have parts that are kept apart")
    turned = run(states, half)
    if _is_near((turned.query, turned.key), (plain.query, plain.key), exact=True):
        return _Reading(False, "half", _is_linear(module, run, states, nothing, config), softmax)
    rotations: tuple[tuple[Any, tuple[Tensor, ...], Rotation], ...] = (
        (_turn_halves, (half,), "half"),
        (_turn_neighbours, (half, neighbours), "interleaved"),
    )
    for turn, layouts, rotation in rotations:
        expected = [turn(each, angle.to(each)[:, None]) for each in (plain.query, plain.key)]
        for layout in layouts:  # families pass the angles of pairs in either order
            turned = run(states, layout)
            if _is_near((turned.query, turned.key), expected):
                linear = rotation == "half" and _is_linear(module, run, states, nothing, config)
                return _Reading(True, rotation, linear, softmax)
    return _Reading(True, "other", False, softmax)


def _turn_halves(states: Tensor, angle: Tensor) -> Tensor:
    angles = torch.cat((angle, angle), dim=-1)
    return rotate_half_split(states, angles.cos(), angles.sin())


def _turn_neighbours(states: Tensor, angle: Tensor) -> Tensor:
    """Return states whose channels 2i and 2i + 1 are rotated as a pair."""
    n_rotated = 2 * angle.shape[-1]
    pairs, rest = torch.unflatten(states[..., :n_rotated], -1, (-1, 2)), states[..., n_rotated:]
    first, second = pairs.unbind(-1)
    turned = torch.stack((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)
    return torch.cat((turned.flatten(-2), rest), dim=-1)


def _is_near(actual: Sequence[Tensor], expected: Sequence[Tensor], *, exact: bool = False) -> bool:
    return all(
        torch.allclose(states, other, rtol=0, atol=0 if exact else _rounding(other))
        for states, other in zip(actual, expected, strict=True)
    )


def _rounding(states: Tensor) -> float:
    return 8 * torch.finfo(states.dtype).eps * float(states.float().abs().max())


def _is_linear(module: Any, run: Any, states: Tensor, angles: Tensor, config: Any) -> bool:
    """Return whether one hidden channel adds its column of the projections to queries and keys."""
    if getattr(config, "clip_qkv", None) is not None:
        return False
    channel, states = 1, states.clone()
    states[..., channel] = 0.0
    before = run(states, angles)
    try:
        columns = channel_columns(module, channel, before.query.shape[1], before.key.shape[1], Ranks())
    except (UnsupportedModelError, RuntimeError, AttributeError):
        return False
    old_states = (before.query, before.key)
    # The channel outweighs all others, so that rounding in sixteen bits hides no norm.
    shares = [old.abs().max() / column.abs().max() for old, column in zip(old_states, columns, strict=True)]
    states[..., channel] = 8 * max(shares)
    amount = states[0, 0, channel]  # as it was rounded
    after = run(states, angles)
    pairs = zip(old_states, (after.query, after.key), columns, strict=True)
    return all(
        torch.allclose(new - old, (amount * column[None, :, None]).expand_as(old), rtol=0, atol=4 * _rounding(new))
        for old, new, column in pairs
    )
