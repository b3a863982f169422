"""CacheBlend: recompute some tokens of independently encoded passages."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rag_posfix.attention.blockwise import QUERY_BLOCK
from rag_posfix.plan.plan import AttentionInput, AttentionOverride


def deviation(fresh: Tensor, cached: Tensor) -> Tensor:
    """Return how far each token's cached values are from the recomputed ones, (T,) float32.

    Source: Yao et al. (2024), CacheBlend, section 4.2, https://arxiv.org/abs/2405.16444
    Formula: the sum of (V - V cached)^2 over heads and channels.

    Shapes:
        fresh, cached: (1, Hkv, T, D), values of one layer.
    """
    return (fresh.float() - cached.float()).square().sum(dim=(0, 1, 3))


def most_deviating(deviations: Tensor, start: int, fraction: float) -> Tensor:
    """Return the ceil(fraction (T - start)) tokens from ``start`` on that deviate most, ascending.

    Of tokens that deviate alike the first are taken, on every machine.

    Shapes:
        deviations: (T,). returns: (n,) int64.
    """
    some = deviations[start:]
    order = some.argsort(descending=True, stable=True)[: _share(fraction, some.shape[0])]
    return (order + start).sort().values


def first_tokens(spans: list[tuple[int, int]], fraction: float) -> Tensor:
    """Return the first tokens of each segment, ascending; ``spans`` are (start, stop).

    Source: Hu et al. (2024), EPIC, section 4 (LegoLink), https://arxiv.org/abs/2410.15332
    """
    tokens = [torch.arange(start, start + _share(fraction, stop - start)) for start, stop in spans]
    return torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.long)


def _share(fraction: float, count: int) -> int:
    """Return the number that is ``fraction`` of ``count``, rounded up."""
    return min(count, -int(-fraction * count // 1))


class SelectedAttention(AttentionOverride):
    """Some tokens of a prompt, anywhere in it, see every token up to themselves.

    Args:
        chosen: (n,) int64, which tokens the queries are, ascending. The keys cover the full prompt.
    """

    needs_mask: ClassVar[bool] = False

    def __init__(self, chosen: Tensor) -> None:
        self._chosen = chosen
        lasts = chosen[QUERY_BLOCK - 1 :: QUERY_BLOCK]
        if len(chosen) % QUERY_BLOCK:
            lasts = torch.cat((lasts, chosen[-1:]))
        self._lasts: list[int] = lasts.tolist()  # once, not in every layer: it waits for the device

    def __call__(self, inputs: AttentionInput) -> tuple[Tensor, Tensor | None]:
        """Attend block by block: a (256, Tk) mask at a time."""
        outs = []
        for block, last_token in enumerate(self._lasts):
            first, last = block * QUERY_BLOCK, last_token + 1
            chosen = self._chosen[first : first + QUERY_BLOCK]
            query = inputs.query[:, :, first : first + QUERY_BLOCK]
            outs.append(
                _attend_masked(query, inputs.key[:, :, :last], inputs.value[:, :, :last], chosen, inputs.scaling)
            )
        return torch.cat(outs, dim=2), None


def _attend_masked(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, scaling: float) -> Tensor:
    """Return attention of tokens ``chosen`` over all keys up to each; the heads of a group share their keys."""
    groups = query.shape[1] // key.shape[1]
    mask = torch.arange(key.shape[2], device=key.device) <= chosen[:, None]  # (n, Tk)
    folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])  # (B, Hkv, G n, D)
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask.repeat(groups, 1), scale=scaling)
    return out.reshape(query.shape)
