"""The waveform of rotary encoding: how attention between like vectors rises and falls with their distance.

It knows frequencies and distances; no model and no plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError

TROUGH_SHARE = 0.1


def waveform(head_dim: int, base: float, distances: Tensor) -> Tensor:
    """Return how strongly two like vectors of ones attend to each other at these distances under a RoPE base.

    Source: Chen et al. (2023), Fortify the Shortest Stave in Attention (Attention Buckets),
    https://arxiv.org/abs/2312.04455
    Formula: W_B(m) = (2 / sqrt(d)) sum_i cos(m B^(-2i/d)), i = 0 ... d/2 - 1.

    Shapes:
        distances: (M,). returns: (M,) float64.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=distances.device) / head_dim
    angles = distances.double()[:, None] * base**-exponents  # (M, d / 2)
    total: Tensor = angles.cos().sum(dim=-1) * (2 / head_dim**0.5)
    return total


def trough_depth(envelope: Tensor) -> float:
    """Return the mean of the lowest tenth of a waveform, of at least one distance: the higher, the better covered.

    Shapes:
        envelope: (M,).
    """
    count = max(1, int(envelope.shape[0] * TROUGH_SHARE))
    return float(envelope.topk(count, largest=False).values.mean())


def search_factors(
    head_dim: int, base: float, candidates: Sequence[float], count: int, context: int
) -> tuple[float, ...]:
    """Return factors of a RoPE base whose waveforms cover each other's troughs, beginning with 1.

    What is optimised: ``trough_depth`` of the envelope max_j W_{f_j B}(m) over the distances m = 0 ... context - 1.
    Greedily: start from the model's own base, and add the candidate that raises it most, until there are ``count``;
    of candidates alike the first. The mean of the lowest tenth is taken, not the minimum, so that one distance does
    not decide.

    Args:
        head_dim: Channels of a head that are rotated, d; even.
        base: The model's RoPE base, B.
        candidates: Factors to choose from, above 0.
        count: How many factors to return, 1 included.
        context: How many distances are to be covered.

    Raises:
        ConfigError: a size or a factor is outside of what is allowed, or there are too few candidates.
    """
    left = [factor for factor in dict.fromkeys(candidates) if factor != 1.0]
    if head_dim < 2 or head_dim % 2 or base <= 0 or context < 1 or any(not factor > 0 for factor in left):
        raise ConfigError(
            f"no waveform for head_dim={head_dim}, base={base}, context={context}, candidates={tuple(candidates)}; "
            "head_dim must be even, the others above 0"
        )
    if not 1 <= count <= len(left) + 1:
        raise ConfigError(
            f"count={count} factors cannot be chosen from {len(left)} candidates and 1; "
            f"it must be 1 to {len(left) + 1}"
        )
    distances = torch.arange(context)
    waves = {factor: waveform(head_dim, base * factor, distances) for factor in left}
    envelope, chosen = waveform(head_dim, base, distances), [1.0]
    while len(chosen) < count:
        best = max(left, key=lambda factor: trough_depth(torch.maximum(envelope, waves[factor])))
        envelope = torch.maximum(envelope, waves[best])
        left.remove(best)
        chosen.append(best)
    return tuple(chosen)
