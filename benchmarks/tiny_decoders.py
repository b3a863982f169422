"""Tiny random models of every decoder that transformers has, from the defaults of its configuration made small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES: Mapping[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "d_model": 64, "n_embd": 64, "embed_dim": 64, "dim": 64,
    "intermediate_size": 96, "d_ff": 96, "ffn_dim": 96, "ffn_hidden_size": 96, "n_inner": 96, "decoder_ffn_dim": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 96,
    "expert_ffn_hidden_size": 32, "intermediate_size_mlp": 96, "mlp_hidden_size": 96, "block_ff_dim": 96,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "qk_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "rotary_dim": 8,
    "attention_hidden_size": 64, "attention_head_dim": 16, "word_embed_proj_dim": 64, "embedding_size": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "moe_num_experts": 4, "moe_k": 2, "moe_topk": 2, "zero_expert_num": 0,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128, "context_length": 128,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_n_groups": 1, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "mamba_d_state": 8, "ssm_state_size": 8, "state_size": 8, "mamba_expand": 2, "n_groups": 1,
    "mamba_ngroups": 1, "mamba_headdim": 16, "n_mamba_heads": 2, "mamba_dt_rank": 4, "time_step_rank": 4,
    "lru_width": 64,
    "conv_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 131,
    "sliding_window": 32, "attention_window_size": 32, "attention_chunk_size": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "original_max_position_embeddings": 64,
}  # fmt: skip
"""Attribute of a configuration -> its tiny value, where the configuration has the attribute and it is not None."""

_OFF_BY_NONE = ("sliding_window", "attention_chunk_size", "q_lora_rank", "hidden_size_per_layer_input", "rotary_dim")
"""Attributes that are left off where the default is None."""

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "zaya": {"num_experts_per_tok": 1},
    "xlstm": {"num_heads": 4, "head_dim": None},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
}

LAYERS = 4
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_LAYER_LISTS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "no_rope_layers",
    "block_types",
    "mlp_only_layers",
)


def decoder_types() -> tuple[str, ...]:
    """Return the model types of ``AutoModelForCausalLM``, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def tiny_config(model_type: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Return a small configuration of a model type; ``changes`` are set last, on the part that describes the text."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    defaults = kind()
    text = defaults.get_text_config(decoder=True)
    if text is defaults:
        return kind(**_tiny_settings(text, changes or {}))
    parts = {
        name: _tiny_settings(part, {} if part is not text else changes or {})
        for name, part in vars(defaults).items()
        if name.endswith("_config") and hasattr(part, "to_dict")
    }
    return kind(**parts)


def _tiny_settings(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    held = {*config.to_dict(), *config.attribute_map}
    settings |= {
        name: value
        for name, value in SIZES.items()
        if name in held and (name not in _OFF_BY_NONE or _value(config, name) is not None)
    }
    if "kv_lora_rank" in settings:  # multi-head latent attention: every query head has its key
        settings["num_key_value_heads"] = settings["num_attention_heads"]
        settings["head_dim"] = settings["qk_rope_head_dim"]
    settings |= {name: LAYERS for name in _LAYER_COUNTS if isinstance(_value(config, name), int)}
    for name in _LAYER_LISTS:
        value = _value(config, name)
        is_set = not isinstance(getattr(type(config), config.attribute_map.get(name, name), None), property)
        if is_set and isinstance(value, list | tuple) and len(value) >= LAYERS:
            first = list(value[: LAYERS - 1])
            settings[name] = [*first, next((entry for entry in value if entry not in first), value[LAYERS - 1])]
    return {**settings, **CHANGES.get(config.model_type, {}), **changes}


def _value(config: Any, name: str) -> Any:
    """Return an attribute; None where it is missing or differs by layer."""
    try:
        return getattr(config, name, None)
    except (AttributeError, ValueError):
        return None


def tiny_model(config: Any) -> Any:
    """Return a random float32 model with stock attention; the same numbers for every call."""
    import torch

    from rag_posfix.generation.load import auto_class_of

    torch.manual_seed(0)
    model = auto_class_of(config).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
