"""Rotary position encoding: rotating vectors by given angles, and how attention falls and rises with distance.

CacheBlend: recompute some tokens of independently encoded passages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rag_posfix.attention.masks import QUERY_BLOCK
from rag_posfix.errors import ConfigError
from rag_posfix.lazy_torch import Tensor, torch
from rag_posfix.plan.plan import AttentionInput, AttentionOverride


def rotate_half_split(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``cos.shape[-1]`` channels of each vector, pairing channel i with channel i + half.

    Source: Su et al. (2021), RoFormer, section 3.4.2, https://arxiv.org/abs/2104.09864; the pairing is that of Llama
    (first half with second half), not the paper's (neighbours).
    Formula: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). Channels beyond the rotated ones (partial rotary) pass.

    Shapes:
        states: (B, H, T, D). cos, sin: broadcast to (B, H, T, rotated), in the dtype of ``states``.
    """
    n_rotated = cos.shape[-1]
    if n_rotated == states.shape[-1]:
        return states * cos + quarter_turn(states) * sin
    rotated = rotate_half_split(states[..., :n_rotated], cos, sin)
    return torch.cat((rotated, states[..., n_rotated:].expand(*rotated.shape[:-1], -1)), dim=-1)


def quarter_turn(states: Tensor) -> Tensor:
    """Return vectors turned by a quarter, (x1, x2) -> (-x2, x1); all of their channels rotate."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def add_rotation(states: Tensor, phases: Tensor) -> Tensor:
    """Rotate vectors that are rotated already by some more, without scaling them again.

    Formula: R_b (a R_m x) = a R_(m + b) x: rotations add up; the factor a that YaRN gives cos and sin stays as it is.

    Shapes:
        states: (B, H, T, D). phases: (B | 1, h, T | 1, pairs) complex, as ``Rotation.phases`` gives them, h one of 1,
        Hkv, H; no pairs where nothing rotates. returns: (B, H, T, D) in the dtype of ``states``, computed in float32.
    """
    if not phases.shape[-1]:
        return states
    phases = phases / phases.abs()
    if 1 < phases.shape[1] < states.shape[1]:  # the query heads of a group add_rotation like their key head
        phases = phases.repeat_interleave(states.shape[1] // phases.shape[1], dim=1)
    cos, sin = (torch.cat((values, values), dim=-1) for values in (phases.real, phases.imag))
    return rotate_half_split(states.float(), cos, sin).to(states.dtype)


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
    head_dim: int,
    base: float,
    candidates: Sequence[float],
    count: int,
    context: int,
    wave_of: Callable[[float], Tensor] | None = None,
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
        wave_of: Returns the waveform of a factor, (context,) float64; ``waveform`` by default. A model that scales its
            frequencies (Llama 3, YaRN) has another one.

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
    wave_of = wave_of or (lambda factor: waveform(head_dim, base * factor, distances))
    waves = {factor: wave_of(factor) for factor in left}
    envelope, chosen = wave_of(1.0), [1.0]
    while len(chosen) < count:
        best = max(left, key=lambda factor: trough_depth(torch.maximum(envelope, waves[factor])))
        envelope = torch.maximum(envelope, waves[best])
        left.remove(best)
        chosen.append(best)
    return tuple(chosen)


def deviation(fresh: Tensor, cached: Tensor) -> Tensor:
    """Return how far each token's cached values are from the recomputed ones, (T,) float32.

    Source: Yao et al. (2024), CacheBlend, section 4.2, https://arxiv.org/abs/2405.16444
    Formula: the sum of (V - V cached)^2 over heads and channels.

    Shapes:
        fresh, cached: (1, Hkv, T, D), values of one layer.
    """
    return (fresh.float() - cached.float()).square().sum(dim=(0, 1, 3))


def largest(scores: Tensor, start: int, fraction: float) -> Tensor:
    """Return the ceil(fraction (T - start)) tokens from ``start`` on with the largest scores, ascending.

    Of tokens with equal scores the first are taken, on every machine.

    Shapes:
        scores: (T,). returns: (n,) int64.
    """
    some = scores[start:]
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
    out = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=mask.repeat(groups, 1), scale=scaling
    )
    return out.reshape(query.shape)
