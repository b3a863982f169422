<<<<<<< HEAD
"""Runs an ``Attend`` without a model, on random queries and keys that it may rotate."""

from __future__ import annotations

import torch

from rag_posfix.attention.attend import AttendInput, Rotated
from rag_posfix.attention.reference import reference_attention, reference_scores
from rag_posfix.attention.rope import rotate_half_split

HEADS, KV_HEADS, SIZE = 6, 2, 8
FREQUENCIES = 10.0 ** -torch.arange(SIZE // 2).float()


def rotate(states, positions):
    """Rotate (1, H, T, D) to positions (1, T) or (1, H, T)."""
    at = positions if positions.dim() == 3 else positions[:, None]
    if 1 < at.shape[1] < states.shape[1]:
        at = at.repeat_interleave(states.shape[1] // at.shape[1], dim=1)
    angle = at[..., None] * FREQUENCIES
=======
"""One layer's attention without a model: random states, rotated by hand, for tests of what replaces attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rag_posfix.attention.attend import Attend, AttendInput, Rotated
from rag_posfix.attention.rope import rotate_half_split

N_HEADS, N_KV_HEADS, HEAD_DIM = 6, 2, 8
FREQUENCIES = 100.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))


def rotate(states: Tensor, positions: Tensor) -> Tensor:
    """Rotate (B, H, T, D) to positions (B, T)."""
    angle = positions[:, None, :, None].float() * FREQUENCIES
>>>>>>> cal
    angle = torch.cat((angle, angle), dim=-1)
    return rotate_half_split(states, angle.cos(), angle.sin())


<<<<<<< HEAD
def random_states(n_tokens, seed=0, scale=1.5):
    """Return unrotated query (1, Hq, T, D), key and value (1, Hkv, T, D)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, HEADS, n_tokens, SIZE), (1, KV_HEADS, n_tokens, SIZE), (1, KV_HEADS, n_tokens, SIZE))
    return tuple(scale * torch.randn(shape, generator=generator) for shape in shapes)


def run(attend, query, key, value, positions, start=0, layer=0, plain=None):
    """Return what ``attend`` computes for the tokens from ``start`` on. Shapes: (Hq, T - start, D), (Tk) or None."""
    given_key = key if attend.rotated is Rotated.NEITHER else rotate(key, positions)
    given_query = query[:, :, start:]
    if attend.rotated is Rotated.BOTH:
        given_query = rotate(given_query, positions[:, start:])

    def unavailable():
        raise AssertionError("plain() is not there in this test")

    out, newest = attend(
        AttendInput(given_query, given_key, value, positions, SIZE**-0.5, layer, rotate, plain or unavailable)
    )
    return out[0], None if newest is None else newest[0]


def reference(query, key, value, distance, visible):
    """Return attention by explicit distances and visibility, (Hq, T, D)."""
    scores = reference_scores(query[0], key[0], distance, FREQUENCIES, SIZE**-0.5)
    return reference_attention(scores, value[0], visible)
=======
@dataclass(frozen=True)
class States:
    """Unrotated queries, keys and values of all tokens: (Hq, T, D), (Hkv, T, D), (Hkv, T, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float = 0.6

    def run(self, attend: Attend, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Return what ``attend`` makes of the queries ``start``..``stop`` - 1, whose keys are 0..``stop`` - 1."""
        positions = torch.arange(stop).float()[None]
        query, key = self.query[None, :, start:stop], self.key[None, :, :stop].clone()
        turned = rotate(query, positions[:, start:])
        key = key if attend.rotated is Rotated.NEITHER else rotate(key, positions)
        value = self.value[None, :, :stop]

        def plain() -> Tensor:
            rows = torch.arange(start, stop)[:, None] >= torch.arange(stop)
            return torch.nn.functional.scaled_dot_product_attention(
                turned, rotate(self.key[None, :, :stop], positions), value, rows, scale=self.scaling, enable_gqa=True
            )

        return attend(
            AttendInput(
                query=turned if attend.rotated is Rotated.BOTH else query,
                key=key, value=value, positions=positions, scaling=self.scaling, layer=0, rotate=rotate, plain=plain,
            )
        )  # fmt: skip


def random_states(n_tokens: int, seed: int = 0) -> States:
    generator = torch.Generator().manual_seed(seed)
    heads = (N_HEADS, N_KV_HEADS, N_KV_HEADS)
    return States(*(torch.randn((count, n_tokens, HEAD_DIM), generator=generator) for count in heads))


def distances(n_tokens: int) -> Tensor:
    """Query index minus key index, (T, T)."""
    return torch.arange(n_tokens)[:, None] - torch.arange(n_tokens)
>>>>>>> cal
