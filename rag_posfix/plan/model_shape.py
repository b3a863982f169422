"""What a mitigation may know of the model it plans for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Capability(StrEnum):
    """What a plan may change in a model. A mitigation names the capabilities that it needs."""

    POSITIONS = "positions"
    """Positions of tokens may be set, the same for all heads."""
    FULL_CACHE = "full_cache"
    """Every layer keeps the keys of all tokens: masks and joined passages mean what they say."""
    ROTATION = "rotation"
    """Queries and keys can be had unrotated, so that positions may differ between heads and between passages."""
    ANGLES = "angles"
    """The rotary encoding may turn by other angles: positions divided per layer, another base."""
    HIDDEN_CHANNEL = "hidden_channel"
    """Queries and keys are linear in the hidden state (no norm in between), so that one channel may be scaled."""
    SOFTMAX = "softmax"
    """Attention is the softmax of scaled scores, without soft caps and sinks, so that a method may compute its own."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and capabilities of a model.

    Attributes:
        n_layers: Decoder layers.
        n_heads: Query heads, Hq.
        n_kv_heads: Key/value heads, Hkv.
        head_dim: D.
        hidden_size: Channels of the hidden state.
        context_window: Most positions that the model was trained for.
        capabilities: What a plan may change.
        lacks: Why the other capabilities are missing, in words, where that is known.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    context_window: int
    capabilities: frozenset[Capability]
    lacks: Mapping[Capability, str] = field(default_factory=dict, hash=False)
