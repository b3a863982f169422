"""Runs an ``AttentionOverride`` without a model, and computes what it must: float32, every score materialised."""

from __future__ import annotations

import torch

from rag_posfix.attention import masks
from rag_posfix.attention.rope import rotate_half_split
from rag_posfix.plan.plan import AttentionInput, RopeAppliedTo

HEADS, KV_HEADS, SIZE = 6, 2, 8
FREQUENCIES = 10.0 ** -torch.arange(SIZE // 2).float()


class Rotation:
    """Rotates to positions, and scales what it rotates, as YaRN does."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, states, positions):
        """Rotate (1, H, T, D) to positions (1, T) or (1, H, T)."""
        phases = self.phases(positions)
        if 1 < phases.shape[1] < states.shape[1]:
            phases = phases.repeat_interleave(states.shape[1] // phases.shape[1], dim=1)
        cos, sin = (torch.cat((part, part), dim=-1) for part in (phases.real, phases.imag))
        return rotate_half_split(states, cos, sin)

    def phases(self, positions):
        at = positions if positions.dim() == 3 else positions[:, None]
        angle = at[..., None] * FREQUENCIES
        return torch.complex(angle.cos(), angle.sin()) * self.scale


rotate = Rotation()


def use_products(monkeypatch):
    """Compute pieces of attention in bfloat16 by products, of any size and on every processor."""
    monkeypatch.setattr(masks, "PRODUCTS_FROM", 1)
    monkeypatch.setattr(masks, "multiplies_without_matrix_units", lambda: True)


def random_states(n_tokens, seed=0, scale=1.5):
    """Return unrotated query (1, Hq, T, D), key and value (1, Hkv, T, D)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, HEADS, n_tokens, SIZE), (1, KV_HEADS, n_tokens, SIZE), (1, KV_HEADS, n_tokens, SIZE))
    return tuple(scale * torch.randn(shape, generator=generator) for shape in shapes)


def run(attend, query, key, value, positions, start=0, layer=0, plain=None, rotate=rotate):
    """Return what ``attend`` computes for the tokens from ``start`` on. Shapes: (Hq, T - start, D), (Tk) or None."""
    given_key = key if attend.rotated is RopeAppliedTo.NEITHER else rotate(key, positions)
    given_query = query[:, :, start:]
    if attend.rotated is RopeAppliedTo.BOTH:
        given_query = rotate(given_query, positions[:, start:])

    def unavailable():
        raise AssertionError("plain() is not there in this test")

    out, newest = attend(
        AttentionInput(given_query, given_key, value, positions, SIZE**-0.5, layer, rotate, plain or unavailable)
    )
    return out[0], None if newest is None else newest[0]


def reference(query, key, value, distance, visible, scale=1.0):
    """Return attention by explicit distances and visibility, (Hq, T, D)."""
    scores = reference_scores(query[0], key[0], distance, FREQUENCIES, scale**2 * SIZE**-0.5)
    return reference_attention(scores, value[0], visible)


def reference_scores(query, key, distance, frequencies, scaling):
    """Return q^T R(distance) k scaling for every pair: RoPE by relative distance alone.

    Source: Su et al. (2021), RoFormer, equation 16, https://arxiv.org/abs/2104.09864
    Formula: score(m, n) = (R_{m - n} q_m)^T k_n; with ``distance`` in the place of m - n.

    Shapes:
        query: (Hq, Tq, D) and key: (Hkv, Tk, D), unrotated. distance: (Tq, Tk) or (Hq, Tq, Tk), may be fractional.
        frequencies: (rotated / 2,). returns: (Hq, Tq, Tk) float32.

    Cost: a (Hq, Tq, Tk, D) tensor. For tests.
    """
    key = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0).float()
    angle = distance.expand(query.shape[0], -1, -1)[..., None].float() * frequencies.float()
    angle = torch.cat((angle, angle), dim=-1)  # (Hq, Tq, Tk, rotated)
    turned = rotate_half_split(query.float()[:, :, None].expand(-1, -1, key.shape[1], -1), angle.cos(), angle.sin())
    return (turned * key[:, None]).sum(dim=-1) * scaling


def reference_attention(scores, value, visible):
    """Return softmax over the visible keys, times V.

    Shapes:
        scores: (Hq, Tq, Tk). value: (Hkv, Tk, D). visible: (Tq, Tk) bool. returns: (Hq, Tq, D) float32.
    """
    value = value.repeat_interleave(scores.shape[0] // value.shape[0], dim=0).float()
    return scores.float().masked_fill(~visible, float("-inf")).softmax(dim=-1) @ value
