"""The attention hook: one attention function, one mask function and one module hook that apply the forward context.

Without a context all three are exactly transformers' own. A context is switched on in a ``ContextVar``, inside the
thread that runs the model, so threads with different plans share one model. Nothing is stored on a module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from rag_posfix.attention.blockwise import attend_causal_rows
from rag_posfix.attention.masks import causal_rows
from rag_posfix.attention.weights import head_attention, last_query_attention
from rag_posfix.errors import GenerationError, UnsupportedModelError
from rag_posfix.patching.forward_context import ForwardContext, LastLayerRead, Observer, current
from rag_posfix.patching.rotation import LayerRotation, layer_rotation
from rag_posfix.patching.spec import ModelSpec, Ranks
from rag_posfix.plan.plan import AttentionInput, HeadScale, HiddenScale, Rotated

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
        rotated = Rotated.BOTH if attend is None else attend.rotated
        if rotated is Rotated.NEITHER:
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
            if attend.rotated is Rotated.BOTH:
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
