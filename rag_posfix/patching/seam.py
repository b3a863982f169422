"""The seam: one attention function and one mask function that read what the running call asks for.

Idle, both are exactly transformers' own. A call is switched on in a ``ContextVar``, inside the thread that runs the
model, so threads with different plans share one model. Nothing is stored on a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rag_posfix.attention.observe import last_query_attention
from rag_posfix.attention.plan import MaskFunction
from rag_posfix.attention.rope import rotate_half_split

__all__ = ["Observer", "SeamCall", "active", "hold_rotation", "seam_attention", "seam_mask"]


@dataclass(slots=True)
class Observer:
    """Collects the attention of the newest query, averaged over layers.

    Shapes:
        total: (B, Tk) float32, summed over layers.
    """

    total: Tensor | None = None
    n_layers: int = 0

    def add(self, attention: Tensor) -> None:
        """Add one layer's (B, Tk)."""
        self.total = attention if self.total is None else self.total + attention
        self.n_layers += 1

    def mean(self) -> Tensor | None:
        """Return the mean over layers, (B, Tk), or None if no layer reported."""
        return None if self.total is None else self.total / self.n_layers


@dataclass(frozen=True, slots=True, eq=False)
class SeamCall:
    """What one forward pass does differently.

    Attributes:
        mask: Complete mask that replaces the causal one.
        positions: (1 | Hq, Tk) positions of every key so far; queries are the last of them. When set, the model hands
            over unrotated queries and keys (and caches keys unrotated), and they are rotated here.
        angles: The model's own cos and sin; needed with ``positions``.
        observer: Receives the attention of the newest query.
    """

    mask: MaskFunction | None = None
    positions: Tensor | None = None
    angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    observer: Observer | None = field(default=None)


_ACTIVE: ContextVar[SeamCall | None] = ContextVar("rag_posfix_seam_call", default=None)


@contextmanager
def active(call: SeamCall) -> Iterator[None]:
    """Switch ``call`` on for the forward passes of this thread inside the block."""
    token = _ACTIVE.set(call)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def hold_rotation(module: Any, arguments: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Forward hook of the rotary module: rotate by nothing while a call wants to rotate by itself."""
    call = _ACTIVE.get()
    if call is None or call.positions is None:
        return output
    return torch.ones_like(output[0]), torch.zeros_like(output[1])


def seam_mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """Mask function: transformers' own, or the active call's complete mask. Shape (B, 1, Tq, Tk), bool."""
    call = _ACTIVE.get()
    if call is None or call.mask is None:
        result: Tensor | None = sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs)
        return result
    device = torch.device(kwargs.get("device", "cpu"))
    key = torch.arange(kv_length, device=device)[None, :]
    query = torch.arange(kv_length - q_length, kv_length, device=device)[:, None]
    return call.mask(query, key).expand(batch_size, 1, q_length, kv_length)


def seam_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function: transformers' own SDPA, after rotating by the active call's positions.

    Shapes:
        query: (B, Hq, Tq, D). key, value: (B, Hkv, Tk, D).
    """
    call = _ACTIVE.get()
    if call is not None and call.positions is not None and call.angles is not None:
        query, key, value = _rotate(query, key, value, call.positions, call.angles)
    if call is not None and call.observer is not None:
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        call.observer.add(last_query_attention(query, key, attention_mask, scaling, kwargs.get("softcap")))
    result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return result


def _rotate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys; keys are widened first where positions differ between the heads of a group."""
    cos, sin = angles(query, positions[:, : key.shape[2]])  # (1 | Hq, Tk, rotated)
    cos, sin = cos[None], sin[None]
    n_query = query.shape[2]
    if positions.shape[0] > 1:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    query = rotate_half_split(query, cos[:, :, -n_query:], sin[:, :, -n_query:])
    return query, rotate_half_split(key, cos, sin), value
