"""Tiny random models and layouts without text, for tests of numerics."""

from __future__ import annotations

import tokenizers
import transformers

from rag_posfix.conformance.models import COMMON, VOCABULARY, random_model, toy_layout
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.patching.install import install

__all__ = ["COMMON", "FAMILIES", "VOCABULARY", "loaded_model", "save_tiny", "stock_model", "toy_layout"]

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
    return random_model(name, **{**settings, **overrides})


def loaded_model(family: str = "llama", **overrides) -> LoadedModel:
    """Return the same model with the attention hook on it."""
    model = stock_model(family, **overrides)
    return LoadedModel(model, install(model))


def save_tiny(folder, family="llama", **overrides):
    """Write a tiny model and a tokenizer of letters, as a folder that from_pretrained reads."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({chr(code): code for code in range(VOCABULARY)}, []))
    backend.decoder = tokenizers.decoders.Fuse()  # without a decoder, tokens are joined by spaces
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="\x02")
    stock_model(family, **overrides).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
