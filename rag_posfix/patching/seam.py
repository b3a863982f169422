"""The seam: one attention function, one mask function and one hook that read what the running call asks for.

Idle, all three are exactly transformers' own. A call is switched on in a ``ContextVar``, inside the thread that runs
the model, so threads with different plans share one model. Nothing is stored on a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rag_posfix.attention.causal import attend_causal_rows
from rag_posfix.attention.weights import last_query_attention
from rag_posfix.errors import GenerationError
from rag_posfix.patching.call import Observer, SeamCall, current
from rag_posfix.patching.hidden import attend_with_scaled_channel
from rag_posfix.patching.rotation import LayerRotation, layer_rotation
from rag_posfix.patching.spec import ModelSpec
from rag_posfix.plan.attention_override import AttendInput, Rotated
from rag_posfix.plan.plan import HeadScale

__all__ = ["before_attention", "seam_attention", "seam_mask"]


def before_attention(module: Any, arguments: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Hook in front of every attention module: hands it the angles that the call asks for.

    Angles of nothing (cos 1, sin 0) where the seam rotates by itself.
    """
    call = current()
    if call is None:
        return None
    states = given["hidden_states"]
    if call.listener is not None:
        call.listener(module.layer_idx, states)
    calls = [(member.rows, member.call) for member in call.members] or [(slice(None), call)]
    if not any(one.edits.holds_rotation or one.edits.sets_angles for _, one in calls):
        return None
    own = given["position_embeddings"]
    found = [_angles(one, module, states[rows], (own[0][rows], own[1][rows])) for rows, one in calls]
    return arguments, {**given, "position_embeddings": tuple(torch.cat(part) for part in zip(*found, strict=True))}


def _angles(call: SeamCall, module: Any, states: Tensor, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return cos and sin that a call asks for, (B, Tq, rotated); the model's own where it asks for nothing."""
    edits = call.edits
    if not (edits.holds_rotation or edits.sets_angles):
        return own
    spec, positions = _needed(call)
    hidden = edits.hidden_scale
    if hidden is not None and module.layer_idx in hidden.layers:
        call.scratch.channel[module.layer_idx] = states[..., hidden.channel]
    if edits.holds_rotation:
        return torch.ones_like(own[0]), torch.zeros_like(own[1])
    return layer_rotation(edits, spec, module).angles(states, positions[:, -states.shape[1] :])


def seam_mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """Mask function: transformers' own, or the active call's complete mask. Shape (B, 1, Tq, Tk), bool."""
    call = current()
    if call is not None:
        attend = call.edits.attend
        if attend is not None and attend.layers is None and not attend.needs_mask:
            return None
        if call.edits.mask is not None:
            device = torch.device(kwargs.get("device", "cpu"))
            key = torch.arange(kv_length, device=device)[None, :]
            query = torch.arange(kv_length - q_length, kv_length, device=device)[:, None]
            return call.edits.mask(query, key).expand(batch_size, 1, q_length, kv_length)
        if call.starts is not None or call.members:
            return None
    result: Tensor | None = sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs)
    return result


def seam_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function: transformers' own SDPA, or what the active call asks for.

    Shapes:
        query: (B, Hq, Tq, D). key, value: (B, Hkv, Tk, D). returns: (B, Tq, Hq, D).
    """
    call = current()
    if call is None:
        stock: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return stock
    return _Layer(module, call, attention_mask, kwargs).run(query, key, value), None


class _Layer:
    """One layer's attention under a call."""

    def __init__(self, module: Any, call: SeamCall, mask: Tensor | None, options: dict[str, Any]) -> None:
        self.module, self.call, self.mask, self.options = module, call, mask, options
        self.layer: int = module.layer_idx
        scaling = options.get("scaling")
        self.scaling: float = module.head_dim**-0.5 if scaling is None else scaling

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.call.members:
            return self._apart(query)
        edits = self.call.edits
        if edits.holds_rotation:
            return self._rotating(query, key, value)
        if edits.attend is not None and self._in_layers():
            return self._attend(query, key, value, layer_rotation(self.call.edits, _needed(self.call)[0], self.module))
        self._observe(query, key)
        return self._plain(query, key, value)

    def _rotating(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rotate here; keys in place, so that the cache holds them as the next pass needs them."""
        edits, positions, n_query = self.call.edits, _needed(self.call)[1], query.shape[2]
        rotation = self._rotation(query, key)
        if edits.hidden_scale is not None and self.layer in edits.hidden_scale.layers:
            out, turned = attend_with_scaled_channel(
                self.module, self.call, edits.hidden_scale, rotation, query, key, positions,
                lambda q, k: self._plain(q, k, value),
            )  # fmt: skip
            self._observe(turned, key)
            return out
        attend = edits.attend if self._in_layers() else None
        rotated = Rotated.BOTH if attend is None else attend.rotated
        if rotated is Rotated.NEITHER:
            return self._attend(query, key, value, rotation)
        fresh = key[:, :, -n_query:]
        fresh.copy_(rotation(fresh, positions[:, -n_query:]))  # `key` is the cache's own tensor
        query = rotation(query, positions[:, -n_query:])
        if attend is not None:
            return self._attend(query, key, value, rotation)
        self._observe(query, key)
        return self._plain(query, key, value)

    def _rotation(self, query: Tensor, key: Tensor) -> LayerRotation:
        """Return the layer's rotation; the divisors of its heads are decided in the pass that reads the prompt."""
        spec, _ = _needed(self.call)
        rotation = layer_rotation(self.call.edits, spec, self.module)
        decide, ratios = self.call.edits.head_scale, self.call.scratch.head_ratios
        if decide is None:
            return rotation
        if self.layer not in ratios:
            ratios[self.layer] = self._divisors(decide, query[:, :, -1:], key)
        return replace(rotation, ratios=ratios[self.layer])

    def _divisors(self, decide: HeadScale, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the divisors of the key heads that are here; they are decided by how all heads compare."""
        spec, _ = _needed(self.call)
        shape, ranks = spec.shape, spec.ranks
        found = decide(self.layer, ranks.gather(query, shape.n_heads, 1), ranks.gather(key, shape.n_kv_heads, 1))
        return None if found is None else ranks.own_heads(found, key.shape[1])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, rotate: LayerRotation) -> Tensor:
        """Run the plan's own attention."""
        attend, positions = self.call.edits.attend, _needed(self.call)[1]
        if attend is None:
            raise GenerationError("the seam was asked for an attention that the call does not hold; report this")

        def ordinary() -> tuple[Tensor, Tensor]:
            if attend.rotated is Rotated.BOTH:
                return query, key
            return rotate(query, positions[:, -query.shape[2] :]), rotate(key, positions)

        def plain() -> Tensor:
            return self._plain(*ordinary(), value).transpose(1, 2)

        observer = self._asking(self.call.observer)
        given = AttendInput(
            query, key, value, positions, self.scaling, self.layer, rotate, plain, observed=observer is not None
        )
        out, newest = attend(given)  # (B, Hq, Tq, D)
        if observer is not None and newest is None:
            self._observe(*ordinary())
        elif observer is not None and newest is not None:
            observer.add(newest)
        return out.transpose(1, 2)

    def _in_layers(self) -> bool:
        attend = self.call.edits.attend
        return attend is not None and (attend.layers is None or self.layer in attend.layers)

    def _apart(self, query: Tensor) -> Tensor:
        """Attend in each member to its own keys, as it would alone. Returns (B, Tq, Hq, D)."""
        outs = []
        for member in self.call.members:
            alone = _Layer(self.module, member.call, None, self.options)
            outs.append(alone.run(query[member.rows], *member.keys(self.layer)))
        return torch.cat(outs)

    def _plain(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = self.mask
        if mask is None and self.call.starts is not None:
            return attend_causal_rows(query, key, value, self.scaling, self.call.starts).transpose(1, 2)
        if mask is not None and query.shape[2] < mask.shape[2]:
            mask = mask[:, :, -query.shape[2] :]
        out: Tensor = sdpa_attention_forward(self.module, query, key, value, mask, **self.options)[0]
        return out

    def _observe(self, query: Tensor, key: Tensor) -> None:
        self._tell(self._asking(self.call.observer), query, key, self.call.starts, self.mask)

    def _asking(self, observer: Observer | None) -> Observer | None:
        return observer if observer is not None and observer.asks(self.layer) else None

    def _tell(
        self,
        observer: Observer | None,
        query: Tensor,
        key: Tensor,
        starts: Sequence[int] | None,
        mask: Tensor | None = None,
    ) -> None:
        if observer is not None:
            softcap, count = self.options.get("softcap"), min(observer.queries, query.shape[2])
            observer.add(
                last_query_attention(query, key, mask, self.scaling, softcap, starts, count, rough=observer.rough)
            )


def _needed(call: SeamCall) -> tuple[ModelSpec, Tensor]:
    if call.spec is None or call.positions is None:
        raise GenerationError("the seam was asked to rotate without the model's angles and positions; report this")
    return call.spec, call.positions
