"""The attention hook: one attention function, one mask function and one module hook that apply the forward context.

Without a context all three are exactly transformers' own. A context is switched on in a ``ContextVar``, inside the
thread that runs the model, so threads with different plans share one model. Nothing is stored on a module.

The forward context: what one forward pass does differently, switched on per thread. Data only.

Rotation inside the attention hook: the model's own angles at the positions of a plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from rag_posfix.attention.masks import attend_causal_rows, causal_rows, head_attention, last_query_attention
from rag_posfix.attention.rope import add_rotation, rotate_half_split
from rag_posfix.errors import GenerationError, UnsupportedModelError
from rag_posfix.patching.spec import ModelSpec, Ranks
from rag_posfix.plan.plan import AttentionInput, AttentionOverride, HeadScale, HiddenScale, MaskFunction, RopeAppliedTo


@dataclass(slots=True)
class Observer:
    """Collects the attention of the last queries, averaged over them, over layers and the heads that are here.

    Attributes:
        total: (B, Tk) float32, summed over layers.
        n_layers: Layers that have reported.
        queries: How many of the last queries count. With a plan that replaces attention: one.
        layers: The observed layers; None = all.
        approximate: Whether shares suffice whose last digits may be wrong.
        heads: Layer -> query heads that count; then nothing is averaged over heads and layers, and ``by_head`` is
            filled instead of ``total``.
        by_head: Layer -> (B, heads, Tk) float32.
    """

    total: Tensor | None = None
    n_layers: int = 0
    queries: int = 1
    layers: frozenset[int] | None = None
    approximate: bool = False
    heads: Mapping[int, tuple[int, ...]] | None = None
    by_head: dict[int, Tensor] = field(default_factory=dict)

    def observes(self, layer: int) -> bool:
        """Return whether a layer's attention is observed."""
        if self.heads is not None:
            return layer in self.heads
        return self.layers is None or layer in self.layers

    def add(self, attention: Tensor) -> None:
        """Add one layer's (B, Tk)."""
        if self.total is not None and attention.device != self.total.device:  # layers on several devices
            attention = attention.to(self.total.device)
        self.total = attention if self.total is None else self.total + attention
        self.n_layers += 1

    def mean(self) -> Tensor | None:
        """Return the mean over layers, (B, Tk), or None if no layer reported."""
        return None if self.total is None else self.total / self.n_layers


@dataclass(frozen=True, slots=True, eq=False)
class Overrides:
    """What a row's plan changes in the model's attention. All fields at their defaults: the stock path runs.

    Attributes: those of ``RowPlan``.
    """

    mask: MaskFunction | None = None
    rope_base_factor: float | None = None
    layer_scale: tuple[float, ...] | None = None
    head_scale: HeadScale | None = None
    hidden_scale: HiddenScale | None = None
    attend: AttentionOverride | None = None

    @property
    def masks_only(self) -> bool:
        """Whether only the attention mask changes."""
        return all(getattr(self, override.name) is None for override in fields(self) if override.name != "mask")

    @property
    def rotates_in_hook(self) -> bool:
        """Whether the attention hook rotates queries and keys instead of the model."""
        return (
            self.head_scale is not None
            or self.hidden_scale is not None
            or (self.attend is not None and self.attend.rotated is not RopeAppliedTo.BOTH)
        )

    @property
    def changes_angles(self) -> bool:
        """Whether the model rotates by other angles than its own."""
        return self.rope_base_factor is not None or self.layer_scale is not None


@dataclass(slots=True, eq=False)
class LayerState:
    """What the layers of one batch remember between forward passes, and hand on within one.

    Attributes:
        head_divisors: Layer -> position divisor of each key/value head, decided once.
        channel: Layer -> the scaled hidden channel of the tokens of this pass, (B, Tq).
        kept: ``AttentionInput.kept``; tensors in it are never changed in place.
    """

    head_divisors: dict[int, Tensor | None] = field(default_factory=dict)
    channel: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[Hashable, Tensor] = field(default_factory=dict)

    def copy(self) -> LayerState:
        """Return an independent copy."""
        return LayerState(dict(self.head_divisors), {}, dict(self.kept))


class LastLayerRead(Exception):
    """Ends a forward pass after ``ForwardContext.last_layer``. Whoever sets ``last_layer`` catches it."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """What one forward pass does differently.

    Attributes:
        overrides: The plan's changes.
        positions: (B | 1, Tk) positions of every token so far; the queries are the last of them. Needed with overrides
            that rotate or change angles.
        spec: The model's; needed with ``positions``.
        layer_state: Of this batch.
        prompt_length: Tokens that the prompt holds; queries from the last of them on are last tokens.
        observer: Receives the attention of the last queries.
        on_hidden_states: Receives each layer's number and the input of its attention, (B, Tq, hidden).
        starts: The first token of each row among the keys; those before it are padding. If given, causality and
            padding follow from it, and a mask is made only where the plan has one. None: the model's own mask counts.
        last_layer: The pass ends with the keys, values and observed attention of this layer, by ``LastLayerRead``; for
            overrides that leave attention and rotation to the model. None reads all layers.
        slices: Parts of the batch with caches of their own, in the order of the batch; then nothing above is used.
            Rows after the last part are padding: they attend to nothing.
    """

    overrides: Overrides = field(default_factory=Overrides)
    positions: Tensor | None = None
    spec: ModelSpec | None = None
    layer_state: LayerState = field(default_factory=LayerState)
    prompt_length: int = 1
    observer: Observer | None = None
    on_hidden_states: Callable[[int, Tensor], None] | None = None
    starts: tuple[int, ...] | None = None
    last_layer: int | None = None
    slices: tuple[BatchSlice, ...] = ()

    def by_rows(self, n_rows: int) -> list[tuple[slice, ForwardContext]]:
        """Return (rows, context) for all rows of the pass; rows of padding have a context without overrides."""
        if not self.slices:
            return [(slice(None), self)]
        contexts = [(batch_slice.rows, batch_slice.context) for batch_slice in self.slices]
        stop = contexts[-1][0].stop
        return contexts if stop == n_rows else [*contexts, (slice(stop, n_rows), ForwardContext())]


@dataclass(frozen=True, slots=True, eq=False)
class BatchSlice:
    """Rows of a batch that have a cache of their own.

    Attributes:
        rows: Which rows of the batch.
        context: As for a pass over these rows alone; it has ``starts`` and no mask.
        keys: Layer -> (keys, values), each (R, Hkv, Tk, D), of all tokens so far: the cache's own tensors.
    """

    rows: slice
    context: ForwardContext
    keys: Callable[[int], tuple[Tensor, Tensor]]


_ACTIVE: ContextVar[ForwardContext | None] = ContextVar("rag_posfix_forward_context", default=None)


def current() -> ForwardContext | None:
    """Return the context that is switched on in this thread; None leaves the model as it was trained."""
    return _ACTIVE.get()


@contextmanager
def active(context: ForwardContext) -> Iterator[None]:
    """Switch ``context`` on for the forward passes of this thread inside the block."""
    token = _ACTIVE.set(context)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


@dataclass(frozen=True, slots=True, eq=False)
class LayerRotation:
    """Rotates states of one layer to given positions. A ``Rotation`` of ``attention.attend``.

    Attributes:
        spec: The model, whose angles are used.
        rotates: Whether the layer has RoPE.
        base_factor: Factor of the RoPE base.
        scale: Divisor of positions in this layer.
        ratios: (Hkv,) what positions are divided by in each key head and its group of query heads.
    """

    spec: ModelSpec
    rotates: bool = True
    base_factor: float | None = None
    scale: float | None = None
    ratios: Tensor | None = None

    def __call__(self, states: Tensor, positions: Tensor) -> Tensor:
        """Return (B, H, T, D) rotated; positions (B | 1, T) or (B | 1, h, T) with h in 1, Hkv, Hq."""
        if not self.rotates:
            return states
        cos, sin = self._per_head(states, positions, states.shape[1])
        return rotate_half_split(states, cos, sin).to(states.dtype)

    @property
    def name(self) -> Hashable:
        """Divisors of heads are those of one layer, which keeps them."""
        ratios = None if self.ratios is None else id(self.ratios)
        return (self.rotates, self.base_factor, None if self.scale is None else float(self.scale), ratios)

    def phases(self, positions: Tensor) -> Tensor:
        """Return cos + i sin of each pair of channels, (B | 1, h, T, pairs) complex64."""
        positions = positions if positions.dim() == 3 else positions[:, None]
        if not self.rotates:
            return torch.zeros((*positions.shape, 0), dtype=torch.complex64, device=positions.device)
        n_heads = positions.shape[1] if self.ratios is None else max(positions.shape[1], self.ratios.shape[0])
        cos, sin = self._per_head(positions, positions, n_heads)
        pairs = cos.shape[-1] // 2  # both halves hold the same angles
        return torch.complex(cos[..., :pairs].contiguous(), sin[..., :pairs].contiguous())

    def _per_head(self, states: Tensor, positions: Tensor, n_heads: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (B | 1, h, T, rotated) in the dtype of ``states``; the heads' own divisors count."""
        positions = positions if positions.dim() == 3 else positions[:, None]  # (B | 1, h, T)
        if 1 < positions.shape[1] < n_heads:
            positions = positions.repeat_interleave(n_heads // positions.shape[1], dim=1)
        if self.ratios is not None:
            positions = positions / self.ratios.repeat_interleave(n_heads // self.ratios.shape[0])[None, :, None]
        cos, sin = self.angles(states, positions.flatten(0, 1))
        return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)

    def angles(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (B, T, rotated), of positions (B, T) as this layer sees them."""
        if self.scale is not None:
            positions = positions / self.scale
        return self.spec.angles(states, positions, self.base_factor)


def layer_rotation(overrides: Overrides, spec: ModelSpec, module: Any) -> LayerRotation:
    """Return the rotation of one layer under overrides, heads left out."""
    scales = overrides.layer_scale
    return LayerRotation(
        spec=spec,
        rotates=module.layer_idx not in spec.unrotated,
        base_factor=overrides.rope_base_factor,
        scale=None if scales is None else scales[module.layer_idx],
    )


AngleLayout = Literal["halves", "neighbours", "single"]


def angle_layout(rotary: Any) -> AngleLayout:
    """Return how a rotary module lays out a pair's angle: in both halves, side by side (Cohere), once (gpt-oss)."""
    if not hasattr(rotary, "inv_freq"):  # frequencies by the kind of layer (Gemma 3): its base is not changed
        return "halves"
    position = torch.ones(1, 1, dtype=torch.long, device=rotary.inv_freq.device)
    angles = type(rotary).forward(rotary, rotary.inv_freq, position)
    if not isinstance(angles, tuple):  # complex numbers (Llama 4)
        return "single"
    _, sin = angles
    if sin.shape[-1] == rotary.inv_freq.shape[0]:
        return "single"
    return "neighbours" if torch.equal(sin[..., ::2], sin[..., 1::2]) else "halves"


def scaled_base_angles(
    rotary: Any, states: Tensor, positions: Tensor, factor: float, layout: AngleLayout
) -> tuple[Tensor, Tensor]:
    """Return cos and sin with the RoPE base multiplied by ``factor``.

    Formula: base^(-2i/d) -> (factor base)^(-2i/d) = base^(-2i/d) factor^(-2i/d): every one of the model's own inverse
        frequencies, whatever scaling made it, is multiplied by factor^(-i / (d / 2)).

    Shapes:
        positions: (B, T). returns: (B, T, d) each, (B, T, d / 2) for ``single``, in the dtype of ``states``.
    """
    frequencies = rotary.inv_freq.float()  # (d / 2,)
    exponent = torch.arange(frequencies.shape[0], device=frequencies.device) / frequencies.shape[0]
    angle = positions[..., None].float() * (frequencies * factor**-exponent)
    if layout == "halves":
        angle = torch.cat((angle, angle), dim=-1)
    elif layout == "neighbours":
        angle = torch.stack((angle, angle), dim=-1).flatten(-2)
    scaling = getattr(rotary, "attention_scaling", 1.0)
    return (angle.cos() * scaling).to(states.dtype), (angle.sin() * scaling).to(states.dtype)


CHUNK = 2**22
"""Numbers that are rotated at a time, in float32: few operations for short passages, little memory for long ones."""


def rerotate(spec: ModelSpec, keys: Tensor, offset: float) -> Tensor:
    """Return keys of all layers as if each token stood ``offset`` positions further on.

    Formula: R_(m + offset) x = R_offset R_m x in each layer that rotates; what YaRN scales stays scaled once.

    Shapes:
        keys: (L, Hkv, T, D), rotated to their positions. returns: the same.
    """
    if not offset:
        return keys
    phases = LayerRotation(spec).phases(torch.full((1, 1), float(offset), device=keys.device))
    n_layers = max(1, CHUNK // keys[0].numel())
    moved = torch.cat([add_rotation(chunk, phases) for chunk in torch.split(keys, n_layers)])
    for layer in spec.unrotated.intersection(range(len(keys))):
        moved[layer] = keys[layer]
    return moved


_StockAttention = Callable[..., tuple[Tensor, Tensor | None]]
"""An attention function of transformers."""

EAGER_ROWS = 256
"""Queries for which eager attention materialises its scores at a time."""


def channel_columns(module: Any, channel: int, n_heads: int, n_kv_heads: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return what one hidden channel adds to queries and keys: (Hq, D) and (Hkv, D), a column of each weight.

    Args:
        n_heads: Query heads that the module computes here, Hq; fewer than the model's where it is split over ranks.
        n_kv_heads: Key/value heads that it computes here, Hkv.
        ranks: The processes that it is split over.

    Raises:
        UnsupportedModelError: the module has no projections that it can be read from.
    """
    size = module.head_dim
    if hasattr(module, "qkv_proj"):
        n_query, n_key = n_heads * size, n_kv_heads * size
        column = _read_column(module.qkv_proj, channel, n_query + 2 * n_key, ranks)
        return column[:n_query].view(-1, size), column[n_query : n_query + n_key].view(-1, size)
    if not hasattr(module, "q_proj") or not hasattr(module, "k_proj"):
        raise UnsupportedModelError(f"{type(module).__name__} has no q_proj and k_proj; it cannot scale a channel")
    query = _read_column(module.q_proj, channel, n_heads * size, ranks)
    return query.view(-1, size), _read_column(module.k_proj, channel, n_kv_heads * size, ranks).view(-1, size)


def _read_column(projection: Any, channel: int, size: int, ranks: Ranks) -> Tensor:
    """Return one column of a projection's weight, (size,): the outputs that attention gets on this rank."""
    weight: Any = projection.weight
    if not weight.is_floating_point():
        raise UnsupportedModelError(
            f"{type(projection).__name__} holds its weights as {weight.dtype}, from which no channel can be read; "
            "load the model without quantization to scale a channel"
        )
    # A DTensor where the model is split over ranks.
    local_weight = weight.to_local() if hasattr(weight, "to_local") else weight
    return ranks.gather(local_weight[:, channel], size, 0)


def attend_with_scaled_channel(
    module: Any,
    context: ForwardContext,
    scale: HiddenScale,
    rotation: LayerRotation,
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    standard_attention: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the layer's output and its last query, rotated; the cache keeps scaled keys.

    Formula: W (x with x_p scaled by s) = W x + (s - 1) x_p W[:, p]. The last tokens (the prompt's last and every
        generated one) attend with scaled queries and scaled keys; the tokens before them with neither.

    Shapes:
        query: (B, Hq, Tq, D) and the last Tq of key (B, Hkv, Tk, D), unrotated. returns: (B, Tq, Hq, D),
        (B, Hq, Tq', D).
    """
    n_query = query.shape[2]
    first_scaled = max(0, context.prompt_length - 1 - (key.shape[2] - n_query))
    ranks = rotation.spec.ranks
    query_column, key_column = channel_columns(module, scale.channel, query.shape[1], key.shape[1], ranks)
    amount = ((scale.factor - 1.0) * context.layer_state.channel.pop(module.layer_idx))[
        :, None, :, None
    ]  # (B, 1, Tq, 1)
    query_positions, fresh = positions[:, -n_query:], key[:, :, -n_query:]
    raw = fresh.clone() if first_scaled else None
    fresh.copy_(rotation(fresh + amount * key_column[None, :, None], query_positions))
    scaled_query = query[:, :, first_scaled:] + amount[:, :, first_scaled:] * query_column[None, :, None]
    scaled_query = rotation(scaled_query, query_positions[:, first_scaled:])
    out = standard_attention(scaled_query, key)
    if raw is None:
        return out, scaled_query
    # Tokens before the scaled queries see unscaled keys. The cache holds no earlier keys: a prompt is read in one
    # pass.
    before = standard_attention(rotation(query, query_positions), rotation(raw, query_positions))[:, :first_scaled]
    return torch.cat((before, out), dim=1), scaled_query


def before_attention(module: Any, arguments: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Pre-hook of every attention module: passes it the rotary angles of the active context.

    Angles that rotate nothing (cos 1, sin 0) where ``hooked_attention`` rotates queries and keys.
    """
    context = current()
    if context is None:
        return None
    states = kwargs["hidden_states"]
    if context.on_hidden_states is not None:
        context.on_hidden_states(module.layer_idx, states)
    contexts = context.by_rows(states.shape[0])
    overrides = [row_context.overrides for _, row_context in contexts]
    if not any(override.rotates_in_hook or override.changes_angles for override in overrides):
        return None
    cos, sin = kwargs["position_embeddings"]
    angles = [_angles(row_context, module, states[rows], (cos[rows], sin[rows])) for rows, row_context in contexts]
    return arguments, {**kwargs, "position_embeddings": tuple(torch.cat(rows) for rows in zip(*angles, strict=True))}


def _angles(
    context: ForwardContext, module: Any, states: Tensor, model_angles: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of a context, (B, Tq, rotated); ``model_angles`` where its overrides change none."""
    overrides = context.overrides
    if not (overrides.rotates_in_hook or overrides.changes_angles):
        return model_angles
    spec, positions = _spec_and_positions(context)
    hidden = overrides.hidden_scale
    if hidden is not None and module.layer_idx in hidden.layers:
        context.layer_state.channel[module.layer_idx] = states[..., hidden.channel]
    if overrides.rotates_in_hook:
        return torch.ones_like(model_angles[0]), torch.zeros_like(model_angles[1])
    return layer_rotation(overrides, spec, module).angles(states, positions[:, -states.shape[1] :])


def hooked_mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """Mask function: transformers' own, or the active context's complete mask. Shape (B, 1, Tq, Tk), bool."""
    return _mask(sdpa_mask, batch_size, q_length, kv_length, *args, **kwargs)


def hooked_eager_mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """As ``hooked_mask`` for models with eager attention, whose own masks are additive."""
    return _mask(eager_mask, batch_size, q_length, kv_length, *args, **kwargs)


def _mask(
    stock: Callable[..., Tensor | None], batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any
) -> Tensor | None:
    context = current()
    if context is not None:
        attend = context.overrides.attend
        if attend is not None and attend.layers is None and not attend.needs_mask:
            return None
        if context.overrides.mask is not None:
            device = torch.device(kwargs.get("device", "cpu"))
            key = torch.arange(kv_length, device=device)[None, :]
            query = torch.arange(kv_length - q_length, kv_length, device=device)[:, None]
            return context.overrides.mask(query, key).expand(batch_size, 1, q_length, kv_length)
        if context.starts is not None or context.slices:
            return None
    return stock(batch_size, q_length, kv_length, *args, **kwargs)


def hooked_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function: transformers' own SDPA, or the attention of the active context.

    Shapes:
        query: (B, Hq, Tq, D). key, value: (B, Hkv, Tk, D). returns: (B, Tq, Hq, D).
    """
    return _attention(sdpa_attention_forward, module, query, key, value, attention_mask, kwargs)


def hooked_eager_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """As ``hooked_attention`` for models whose own attention is the eager function of their family."""
    return _attention(eager_attention_of(module), module, query, key, value, attention_mask, kwargs)


def eager_attention_of(module: Any) -> _StockAttention:
    """Return the eager attention function of a module's family.

    Raises:
        UnsupportedModelError: the file of its class has none.
    """
    found: _StockAttention | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no eager_attention_forward beside it")
    return found


def _attention(
    stock: _StockAttention,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    context = current()
    if context is None:
        return stock(module, query, key, value, attention_mask, **kwargs)
    layer = _Layer(stock, module, context, attention_mask, kwargs)
    if context.last_layer == layer.layer:  # its keys are in the cache; the output of its attention is not used
        layer.observe(query, key)
        raise LastLayerRead
    return layer.run(query, key, value), None


class _Layer:
    """One layer's attention under a context."""

    def __init__(
        self,
        stock: _StockAttention,
        module: Any,
        context: ForwardContext,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> None:
        self.stock = stock
        self.module, self.context, self.mask, self.options = module, context, mask, options
        self.layer: int = module.layer_idx
        scaling = options.get("scaling")
        self.scaling: float = module.head_dim**-0.5 if scaling is None else scaling
        self.softcap: float | None = options.get("softcap")
        self.sinks: Tensor | None = options.get("s_aux")

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.context.slices:
            return self._attend_per_slice(query)
        overrides = self.context.overrides
        if overrides.rotates_in_hook:
            return self._rotate_and_attend(query, key, value)
        if overrides.attend is not None and self._is_overridden():
            spec, _ = _spec_and_positions(self.context)
            return self._attend(query, key, value, layer_rotation(overrides, spec, self.module))
        self.observe(query, key)
        return self._standard_attention(query, key, value)

    def _rotate_and_attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rotate in the hook; keys in place, so that the cache holds them for the next pass."""
        overrides, positions, n_query = self.context.overrides, _spec_and_positions(self.context)[1], query.shape[2]
        rotation = self._rotation(query, key)
        if overrides.hidden_scale is not None and self.layer in overrides.hidden_scale.layers:
            out, scaled_query = attend_with_scaled_channel(
                self.module, self.context, overrides.hidden_scale, rotation, query, key, positions,
                lambda q, k: self._standard_attention(q, k, value),
            )  # fmt: skip
            self.observe(scaled_query, key)
            return out
        attend = overrides.attend if self._is_overridden() else None
        rotated = RopeAppliedTo.BOTH if attend is None else attend.rotated
        if rotated is RopeAppliedTo.NEITHER:
            return self._attend(query, key, value, rotation)
        fresh = key[:, :, -n_query:]
        fresh.copy_(rotation(fresh, positions[:, -n_query:]))  # `key` is the cache's own tensor
        query = rotation(query, positions[:, -n_query:])
        if attend is not None:
            return self._attend(query, key, value, rotation)
        self.observe(query, key)
        return self._standard_attention(query, key, value)

    def _rotation(self, query: Tensor, key: Tensor) -> LayerRotation:
        """Return the layer's rotation; the divisors of its heads are decided in the pass that reads the prompt."""
        spec, _ = _spec_and_positions(self.context)
        rotation = layer_rotation(self.context.overrides, spec, self.module)
        decide, ratios = self.context.overrides.head_scale, self.context.layer_state.head_divisors
        if decide is None:
            return rotation
        if self.layer not in ratios:
            ratios[self.layer] = self._decide_divisors(decide, query[:, :, -1:], key)
        return replace(rotation, ratios=ratios[self.layer])

    def _decide_divisors(self, decide: HeadScale, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the divisors of the key heads that are here; they are decided by how all heads compare."""
        spec, _ = _spec_and_positions(self.context)
        shape, ranks = spec.shape, spec.ranks
        divisors = decide(self.layer, ranks.gather(query, shape.n_heads, 1), ranks.gather(key, shape.n_kv_heads, 1))
        return None if divisors is None else ranks.own_heads(divisors, key.shape[1])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, rotate: LayerRotation) -> Tensor:
        """Run the plan's own attention."""
        attend, positions = self.context.overrides.attend, _spec_and_positions(self.context)[1]
        if attend is None:
            raise GenerationError(
                "the attention hook was called for an attention override that the context lacks; please report this"
            )

        def ordinary() -> tuple[Tensor, Tensor]:
            if attend.rotated is RopeAppliedTo.BOTH:
                return query, key
            return rotate(query, positions[:, -query.shape[2] :]), rotate(key, positions)

        def standard_attention() -> Tensor:
            return self._standard_attention(*ordinary(), value).transpose(1, 2)

        observer = self._observer()
        inputs = AttentionInput(
            query,
            key,
            value,
            positions,
            self.scaling,
            self.layer,
            rotate,
            standard_attention,
            needs_weights=observer is not None,
            kept=self.context.layer_state.kept,
        )
        out, last_attention = attend(inputs)  # (B, Hq, Tq, D)
        if observer is not None and last_attention is None:
            self.observe(*ordinary())
        elif observer is not None and last_attention is not None:
            observer.add(last_attention)
        return out.transpose(1, 2)

    def _is_overridden(self) -> bool:
        attend = self.context.overrides.attend
        return attend is not None and (attend.layers is None or self.layer in attend.layers)

    def _attend_per_slice(self, query: Tensor) -> Tensor:
        """Attend in each slice of the batch to its own keys, as it would alone. Returns (B, Tq, Hq, D)."""
        outs = []
        for batch_slice in self.context.slices:
            alone = _Layer(self.stock, self.module, batch_slice.context, None, self.options)
            outs.append(alone.run(query[batch_slice.rows], *batch_slice.keys(self.layer)))
        if n_padding := query.shape[0] - self.context.slices[-1].rows.stop:
            outs.append(outs[0].new_zeros((n_padding, *outs[0].shape[1:])))
        return torch.cat(outs)

    def _standard_attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.stock is not sdpa_attention_forward:
            return self._eager_attention(query, key, value)
        mask = self.mask
        if mask is None and self.context.starts is not None:
            return attend_causal_rows(query, key, value, self.scaling, self.context.starts).transpose(1, 2)
        if mask is not None and query.shape[2] < mask.shape[2]:
            mask = mask[:, :, -query.shape[2] :]
        out: Tensor = sdpa_attention_forward(self.module, query, key, value, mask, **self.options)[0]
        return out

    def _eager_attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the family's own eager attention, with its caps and sinks, a block of queries at a time."""
        n_query, mask = query.shape[2], self.mask
        if mask is None:
            mask = causal_rows(self.context.starts or (0,), n_query, key.shape[2], query.device)
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        blocks = (torch.split(rows, EAGER_ROWS, dim=2) for rows in (query, mask[:, :, -n_query:]))
        outs = [
            self.stock(self.module, block, key, value, visible, **self.options)[0]
            for block, visible in zip(*blocks, strict=True)
        ]
        return torch.cat(outs, dim=1)

    def _observer(self) -> Observer | None:
        """Return the observer if it needs this layer's attention."""
        observer = self.context.observer
        return observer if observer is not None and observer.observes(self.layer) else None

    def observe(self, query: Tensor, key: Tensor) -> None:
        """Hand the attention of the last queries to the observer."""
        observer = self._observer()
        if observer is None:
            return
        count, starts = min(observer.queries, query.shape[2]), self.context.starts
        if observer.heads is not None:
            heads = observer.heads[self.layer]
            observer.by_head[self.layer] = head_attention(
                query, key, self.mask, self.scaling, heads, self.softcap, starts, count, self.sinks
            )
            return
        observer.add(
            last_query_attention(
                query,
                key,
                self.mask,
                self.scaling,
                self.softcap,
                starts,
                count,
                self.sinks,
                approximate=observer.approximate,
            )
        )


def _spec_and_positions(context: ForwardContext) -> tuple[ModelSpec, Tensor]:
    if context.spec is None or context.positions is None:
        raise GenerationError(
            "the attention hook was asked to rotate without angles and positions; please report this"
        )
    return context.spec, context.positions
