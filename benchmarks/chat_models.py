"""Chat models that people run: licence, size, traps of tokenizer and template, and the structure of each.

A tiny copy of a model has its type and what decides how it loads and computes: ratio of heads, windows, layers
without rotation, norms, scaling of the rotation, soft caps, sinks, experts, tied weights.
Every decoder of transformers has a tiny random copy, from the defaults of its configuration made small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    "xlstm": {"num_heads": 4, "head_dim": None, "qk_dim_factor": 1.0},  # half of 64 is rounded up to 64
    "zamba": {
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 5e5, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            layers: {"rope_type": "default", "rope_theta": 1e4} for layers in ("full_attention", "sliding_attention")
        }
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": dict.fromkeys(
        ("layer_types", "layers_block_type"), ["linear_attention", "full_attention"] * 2
    ),
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 32},
    "mamba2": {"num_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 8},
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


def tiny_config(model_type: str, changes: Mapping[str, Any] | None = None, sizes: Mapping[str, Any] = SIZES) -> Any:
    """Return a small configuration of a model type; ``changes`` are set last, on the part that describes the text."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    defaults = kind()
    text = defaults.get_text_config(decoder=True)
    if text is defaults:
        return kind(**_tiny_settings(text, changes or {}, sizes))
    parts = {
        name: _tiny_settings(part, {} if part is not text else changes or {}, sizes)
        for name, part in vars(defaults).items()
        if name.endswith("_config") and hasattr(part, "to_dict")
    }
    return kind(**parts)


def _tiny_settings(config: Any, changes: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    held = {*config.to_dict(), *config.attribute_map}
    settings |= {
        name: value
        for name, value in sizes.items()
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


WINDOW = 64
"""Tokens of the sliding windows of a tiny copy."""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A chat model.

    Attributes:
        name: Its id on the Hugging Face hub.
        model_type: In its configuration; of multimodal models the type of the whole.
        parameters: In billions; of mixtures of experts also those that a token uses.
        licence: Of the weights.
        traps: What its tokenizer and its chat template do that others do not.
        heads: Query heads for each key head.
        window: Tokens of its sliding windows, or of its chunks; None without both.
        structure: Further settings of a tiny copy.
    """

    name: str
    model_type: str
    parameters: str
    licence: str
    traps: str
    heads: int = 4
    window: int | None = None
    structure: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        """Return the configuration of a tiny copy."""
        kv_heads = 2 if self.heads <= 4 else 1
        sizes = {"num_attention_heads": kv_heads * self.heads, "num_key_value_heads": kv_heads, "head_dim": 16}
        windows = {} if self.window is None else {"sliding_window": WINDOW, "attention_chunk_size": WINDOW}
        return tiny_config(self.model_type, {**sizes, **windows, **self.structure})


def _rope(theta: float, rope_type: str = "default", **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **settings}}


def _llama3(factor: float) -> dict[str, Any]:
    lengths = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    return _rope(5e5, "llama3", factor=factor, **lengths)


_SLIDING, _FULL = "sliding_attention", "full_attention"
_NO_BOS = "no token begins a prompt"
_THINKS = "answers begin with `<think>`"
_DATE = "the template writes today's date"

CHAT_MODELS: Mapping[str, ChatModel] = {
    model.name: model
    for model in (
        ChatModel(
            "Qwen/Qwen3-8B", "qwen3", "8.2", "Apache-2.0", f"{_NO_BOS}; {_THINKS}", structure=_rope(1e6)
        ),
        ChatModel(
            "Qwen/Qwen2.5-7B-Instruct", "qwen2", "7.6", "Apache-2.0",
            f"{_NO_BOS}; the template adds a system message of its own", heads=7, structure=_rope(1e6),
        ),
        ChatModel(
            "Qwen/Qwen3-30B-A3B", "qwen3_moe", "30.5 (3.3)", "Apache-2.0", f"{_NO_BOS}; {_THINKS}", heads=8,
            structure={"num_experts": 8, "norm_topk_prob": True, **_rope(1e6)},
        ),
        ChatModel(
            "meta-llama/Llama-3.1-8B-Instruct", "llama", "8.0", "Llama 3.1",
            "three tokens end an answer; the template trims contents and writes a fixed date", structure=_llama3(8.0),
        ),
        ChatModel(
            "meta-llama/Llama-3.2-3B-Instruct", "llama", "3.2", "Llama 3.2",
            f"three tokens end an answer; the template trims contents; {_DATE}", heads=3,
            structure={"hidden_size": 96, "tie_word_embeddings": True, **_llama3(32.0)},
        ),
        ChatModel(
            "mistralai/Mistral-7B-Instruct-v0.3", "mistral", "7.2", "Apache-2.0",
            "the system message is written into the last turn of the user; the vocabulary joins the space behind "
            "`[INST]` with the first word",
            structure={"sliding_window": None, **_rope(1e6)},
        ),
        ChatModel(
            "mistralai/Mistral-Small-24B-Instruct-2501", "mistral", "23.6", "Apache-2.0",
            f"without a system message the template writes a long one; {_DATE}",
            structure={"sliding_window": None, "hidden_size": 80, **_rope(1e8)},
        ),
        ChatModel(
            "mistralai/Ministral-8B-Instruct-2410", "mistral", "8.0", "Mistral Research",
            "the system message is written into the last turn of the user",
            structure={"sliding_window": 128, **_rope(1e8)},
        ),
        ChatModel(
            "google/gemma-2-9b-it", "gemma2", "9.2", "Gemma", "a system message is refused; two tokens end an answer",
            heads=2, window=4096,
            structure={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16,
                       "layer_types": [_SLIDING, _FULL] * 2, "tie_word_embeddings": True, **_rope(1e4)},
        ),
        ChatModel(
            "google/gemma-3-4b-it", "gemma3", "4.3", "Gemma",
            "the system message is written into the first turn of the user; two tokens end an answer", heads=2,
            window=1024,
            structure={
                "num_hidden_layers": 6, "layer_types": [_SLIDING] * 5 + [_FULL],
                "rope_parameters": {
                    _FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        ),
        ChatModel(
            "microsoft/phi-4", "phi3", "14.7", "MIT", _NO_BOS,
            structure={"sliding_window": None, **_rope(2.5e5, partial_rotary_factor=1.0)},
        ),
        ChatModel(
            "microsoft/Phi-4-mini-instruct", "phi3", "3.8", "MIT", f"{_NO_BOS}; two tokens end an answer",
            heads=3,
            structure={
                "hidden_size": 96, "sliding_window": 128, "tie_word_embeddings": True,
                "original_max_position_embeddings": 64,
                **_rope(1e4, "longrope", partial_rotary_factor=0.75, original_max_position_embeddings=64,
                        short_factor=[1.0] * 6, long_factor=[2.0] * 6),
            },
        ),
        ChatModel(
            "allenai/OLMo-2-1124-7B-Instruct", "olmo2", "7.3", "Apache-2.0",
            "one token begins a prompt and ends an answer; a context window of 4,096 tokens", heads=1,
            structure=_rope(5e5),
        ),
        ChatModel(
            "HuggingFaceTB/SmolLM3-3B", "smollm3", "3.1", "Apache-2.0", f"{_NO_BOS}; {_THINKS}; {_DATE}",
            structure={"no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True, **_rope(5e6)},
        ),
        ChatModel(
            "openai/gpt-oss-20b", "gpt_oss", "20.9 (3.6)", "Apache-2.0",
            f"reasoning precedes an answer, in a channel of its own; three tokens end an answer; {_DATE}", heads=8,
            window=128,
            structure={
                "layer_types": [_SLIDING, _FULL] * 2, "attention_bias": True,
                **_rope(1.5e5, "yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                        original_max_position_embeddings=64),
            },
        ),
        ChatModel(
            "zai-org/GLM-4-9B-0414", "glm4", "9.4", "MIT",
            "two tokens begin a prompt; three end an answer; the template closes no turn", heads=16,
            structure={"head_dim": 8, **_rope(1e4, partial_rotary_factor=0.5)},
        ),
        ChatModel(
            "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2", "7.6", "MIT",
            "the template opens `<think>`; a system message is written without a turn", heads=7, structure=_rope(1e4),
        ),
        ChatModel(
            "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama", "8.0", "MIT",
            "the template opens `<think>`; a system message is written without a turn", structure=_llama3(8.0),
        ),
        ChatModel(
            "ibm-granite/granite-3.3-8b-instruct", "granite", "8.2", "Apache-2.0",
            f"without a system message the template writes its own; {_DATE}",
            structure={"tie_word_embeddings": True, "embedding_multiplier": 12.0, "attention_multiplier": 0.0625,
                       "residual_multiplier": 0.22, "logits_scaling": 16.0, **_rope(1e7)},
        ),
        ChatModel("tiiuae/Falcon-H1-7B-Instruct", "falcon_h1", "7.6", "Falcon LLM", "", heads=6),
        ChatModel(
            "CohereLabs/c4ai-command-r7b-12-2024", "cohere2", "8.0", "CC-BY-NC-4.0",
            "the template adds a system message of its own", window=4096,
            structure={"layer_types": [_SLIDING] * 3 + [_FULL], "tie_word_embeddings": True, "logit_scale": 0.25,
                       **_rope(5e4)},
        ),
        ChatModel(
            "LGAI-EXAONE/EXAONE-4.0-32B", "exaone4", "32.0", "EXAONE", f"{_THINKS} if asked to", heads=5, window=4096,
            structure={"layer_types": [_SLIDING] * 3 + [_FULL],
                       **_rope(1e6, "llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0,
                               original_max_position_embeddings=64)},
        ),
        ChatModel(
            "meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4", "109 (17)", "Llama 4",
            "three tokens end an answer; the template trims contents", heads=5, window=8192,
            structure={"no_rope_layers": [1, 1, 1, 0], "num_local_experts": 4,
                       "num_experts_per_tok": 1, "use_qk_norm": True, "attn_temperature_tuning": True,
                       "interleave_moe_layer_step": 1, **_rope(5e5)},
        ),
        ChatModel(
            "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistral3", "24.0", "Apache-2.0",
            "without a system message the template writes a long one",
            structure={"sliding_window": None, "hidden_size": 80, **_rope(1e9)},
        ),
    )
}  # fmt: skip
"""By name."""
