"""The table of model families: how each rotates, and what its configuration lets a plan change."""

from __future__ import annotations

from typing import Any

from rag_posfix.attention.shape import Capability, ModelShape
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.spec import Family

__all__ = ["FAMILIES", "family_of", "keeps_all_keys", "shape_of"]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "half", linear=True),
        Family("mistral", "half", linear=True),
        Family("qwen2", "half", linear=True),
        Family("qwen3", "half", linear=False),
        Family("phi3", "half", linear=True),
        Family("gemma", "half", linear=True),
        Family("gemma3_text", "half", linear=False),
        Family("granite", "half", linear=True),
        Family("smollm3", "half", linear=True),
        Family("olmo2", "half", linear=False),
        Family("cohere", "interleaved", linear=False),
        Family("glm4", "interleaved", linear=True),
    )
}


def family_of(config: Any) -> Family:
    """Return the family of a model by its configuration.

    Raises:
        UnsupportedModelError: the family is not in the table.
    """
    model_type = getattr(config, "model_type", None)
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def keeps_all_keys(config: Any) -> bool:
    """Return whether every layer keeps the keys of all tokens (no sliding window, no chunked attention)."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return all(kind == "full_attention" for kind in layer_types)
    return getattr(config, "sliding_window", None) is None


def shape_of(config: Any, family: Family) -> ModelShape:
    """Return sizes and capabilities of a model by its configuration."""
    heads = config.num_attention_heads
    full = keeps_all_keys(config)
    capabilities = {Capability.POSITIONS}
    if full:
        capabilities.add(Capability.FULL_CACHE)
    # Two rotary sets (one per layer type) cannot be driven by one list of positions.
    if family.model_type != "gemma3_text":
        capabilities.add(Capability.ANGLES)
        if full and family.rotation == "half":
            capabilities.add(Capability.ROTATION)
            if family.linear:
                capabilities.add(Capability.HIDDEN_CHANNEL)
    return ModelShape(
        n_layers=config.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        context_window=config.max_position_embeddings,
        capabilities=frozenset(capabilities),
    )
