"""Small GGUF files, written with the ``gguf`` package from tiny models."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.support.tiny import VOCABULARY, stock_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(path: Path, architecture: str = "llama", *, frequencies: bool = False, **settings: object):
    """Write a tiny Llama as a GGUF file, in float32, and return the stock model."""
    model = stock_model("llama", **settings)
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    letters = [chr(code) for code in range(33, 127)] + [chr(code) for code in range(256, 256 + VOCABULARY - 98)]
    alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "ab"]
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(alphabet)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCABULARY - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_name(name), _permuted(name, tensor.numpy(), config))
    if frequencies:
        writer.add_tensor("rope_freqs.weight", np.ones(config.head_dim // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _name(name: str) -> str:
    for stock, written in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")):
        name = name.replace(stock, written)
    for stock, written in _LAYER.items():
        name = name.replace(stock, written)
    return name.replace("model.layers.", "blk.")


def _permuted(name: str, weight: np.ndarray, config) -> np.ndarray:
    """Return queries and keys with neighbouring channels as pairs, as llama.cpp rotates Llama."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for projection, count in heads.items():
        if projection in name:
            halves = weight.reshape(count, 2, weight.shape[0] // count // 2, weight.shape[1])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    return weight
