"""Tiny random models and layouts without text, for tests of numerics."""

from __future__ import annotations

import tokenizers
import torch
import transformers

from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.patching.install import install
from rag_posfix.plan.layout import Layout, Span

VOCABULARY = 131

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES = {
    "llama": ("Llama", {}),
    "llama_yarn": (
        "Llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 128}},
    ),
    "llama3": (
        "Llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "granite": ("Granite", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),  # the fourth layer does not rotate
    "olmo2": ("Olmo2", {}),
}  # fmt: skip


def stock_model(family: str = "llama", **overrides):
    """Return a small random float32 model without the attention hook; the same numbers for every call."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings, **overrides})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def loaded_model(family: str = "llama", **overrides) -> LoadedModel:
    """Return the same model with the attention hook on it."""
    model = stock_model(family, **overrides)
    return LoadedModel(model, install(model))


def toy_layout(lengths=(7, 4, 9, 6), prefix=5, suffix=8, seed=0, relevance=None) -> Layout:
    """Return a layout of random tokens; passage i holds the same tokens whatever the other lengths are."""

    def draw(count, salt):
        generator = torch.Generator().manual_seed(1000 * seed + salt)
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    ids = draw(prefix, 1)
    passages, keys = [], []
    for i, length in enumerate(lengths):
        piece = draw(length, 10 + i)
        passages.append(Span(len(ids), len(ids) + length))
        keys.append("-".join(map(str, piece)))
        ids += piece
    start = len(ids)
    ids += draw(suffix, 2)
    return Layout(
        token_ids=tuple(ids), prefix=Span(0, prefix), passages=tuple(passages), texts=tuple(passages),
        suffix=Span(start, len(ids)), question=Span(start + suffix // 4, len(ids) - suffix // 4),
        keys=tuple(keys), relevance=relevance,
    )  # fmt: skip


def save_tiny(folder, family="llama", **overrides):
    """Write a tiny model and a tokenizer of letters, as a folder that from_pretrained reads."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({chr(code): code for code in range(VOCABULARY)}, []))
    backend.decoder = tokenizers.decoders.Fuse()  # without a decoder, tokens are joined by spaces
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="\x02")
    stock_model(family, **overrides).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
