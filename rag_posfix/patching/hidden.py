"""One hidden channel scaled for the queries and keys of the newest token, by the rank-one identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.forward_context import ForwardContext
from rag_posfix.patching.ranks import Ranks
from rag_posfix.patching.rotation import LayerRotation
from rag_posfix.plan.plan import HiddenScale


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
        column = _column(module.qkv_proj, channel, n_query + 2 * n_key, ranks)
        return column[:n_query].view(-1, size), column[n_query : n_query + n_key].view(-1, size)
    if not hasattr(module, "q_proj") or not hasattr(module, "k_proj"):
        raise UnsupportedModelError(f"{type(module).__name__} has no q_proj and k_proj; it cannot scale a channel")
    query = _column(module.q_proj, channel, n_heads * size, ranks)
    return query.view(-1, size), _column(module.k_proj, channel, n_kv_heads * size, ranks).view(-1, size)


def _column(projection: Any, channel: int, size: int, ranks: Ranks) -> Tensor:
    """Return the column of a projection, ``size`` long: that of the outputs which attention gets here."""
    weight: Any = projection.weight
    if not weight.is_floating_point():
        raise UnsupportedModelError(
            f"{type(projection).__name__} holds its weights as {weight.dtype}, from which no channel can be read; "
            "load the model without quantization to scale a channel"
        )
    own = weight.to_local() if hasattr(weight, "to_local") else weight  # a DTensor where the model is split over ranks
    return ranks.gather(own[:, channel], size, 0)


def attend_with_scaled_channel(
    module: Any,
    context: ForwardContext,
    scale: HiddenScale,
    rotation: LayerRotation,
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    plain: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the layer's output and its newest query, rotated; the cache keeps scaled keys.

    Formula: W (x with x_p scaled by s) = W x + (s - 1) x_p W[:, p]. The newest tokens (the prompt's last and every
        generated one) ask with scaled queries and scaled keys; the tokens before them with neither.

    Shapes:
        query: (B, Hq, Tq, D) and the last Tq of key (B, Hkv, Tk, D), unrotated. returns: (B, Tq, Hq, D),
        (B, Hq, Tq', D).
    """
    n_query = query.shape[2]
    first_newest = max(0, context.prompt_length - 1 - (key.shape[2] - n_query))
    ranks = rotation.spec.ranks
    query_column, key_column = channel_columns(module, scale.channel, query.shape[1], key.shape[1], ranks)
    amount = ((scale.factor - 1.0) * context.layer_state.channel.pop(module.layer_idx))[
        :, None, :, None
    ]  # (B, 1, Tq, 1)
    at, fresh = positions[:, -n_query:], key[:, :, -n_query:]
    raw = fresh.clone() if first_newest else None
    fresh.copy_(rotation(fresh + amount * key_column[None, :, None], at))
    newest = query[:, :, first_newest:] + amount[:, :, first_newest:] * query_column[None, :, None]
    newest = rotation(newest, at[:, first_newest:])
    out = plain(newest, key)
    if raw is None:
        return out, newest
    # The tokens before the newest see unscaled keys. Those before this pass are scaled in the cache already: a prompt
    # is read in one pass, so there are none.
    before = plain(rotation(query, at), rotation(raw, at))[:, :first_newest]
    return torch.cat((before, out), dim=1), newest
