"""One layer's attention without a model: random states, rotated by hand, for tests of what replaces attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rag_posfix.attention.rope import rotate_half_split
from rag_posfix.plan.plan import AttentionInput, AttentionOverride, RopeAppliedTo

N_HEADS, N_KV_HEADS, HEAD_DIM = 6, 2, 8
FREQUENCIES = 100.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))


class _Rotation:
    def __call__(self, states: Tensor, positions: Tensor) -> Tensor:
        """Rotate (B, H, T, D) to positions (B, T)."""
        phases = self.phases(positions)
        cos, sin = (torch.cat((part, part), dim=-1) for part in (phases.real, phases.imag))
        return rotate_half_split(states, cos, sin)

    def phases(self, positions: Tensor) -> Tensor:
        angle = positions[:, None, :, None].float() * FREQUENCIES
        return torch.complex(angle.cos(), angle.sin())


rotate = _Rotation()


@dataclass(frozen=True)
class States:
    """Unrotated queries, keys and values of all tokens: (Hq, T, D), (Hkv, T, D), (Hkv, T, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float = 0.6

    def run(self, attend: AttentionOverride, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Return what ``attend`` makes of the queries ``start``..``stop`` - 1, whose keys are 0..``stop`` - 1."""
        positions = torch.arange(stop).float()[None]
        query, key = self.query[None, :, start:stop], self.key[None, :, :stop].clone()
        turned = rotate(query, positions[:, start:])
        key = key if attend.rotated is RopeAppliedTo.NEITHER else rotate(key, positions)
        value = self.value[None, :, :stop]

        def plain() -> Tensor:
            rows = torch.arange(start, stop)[:, None] >= torch.arange(stop)
            return torch.nn.functional.scaled_dot_product_attention(
                turned, rotate(self.key[None, :, :stop], positions), value, rows, scale=self.scaling, enable_gqa=True
            )

        return attend(
            AttentionInput(
                query=turned if attend.rotated is RopeAppliedTo.BOTH else query,
                key=key, value=value, positions=positions, scaling=self.scaling, layer=0, rotate=rotate,
                standard_attention=plain,
            )
        )  # fmt: skip


def random_states(n_tokens: int, seed: int = 0) -> States:
    generator = torch.Generator().manual_seed(seed)
    heads = (N_HEADS, N_KV_HEADS, N_KV_HEADS)
    return States(*(torch.randn((count, n_tokens, HEAD_DIM), generator=generator) for count in heads))


def distances(n_tokens: int) -> Tensor:
    """Query index minus key index, (T, T)."""
    return torch.arange(n_tokens)[:, None] - torch.arange(n_tokens)
