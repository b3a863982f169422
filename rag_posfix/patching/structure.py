"""How an unlisted model rotates, read from its attention modules: what they compute from hidden states and angles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rag_posfix.attention.rope import rotate_half_split
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.attention_hook import channel_columns
from rag_posfix.patching.families import decoder_of
from rag_posfix.patching.spec import Family, Ranks, Rotation

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
