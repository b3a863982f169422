"""A tiny random model, prompts without text, and the plug-ins that are tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.patching.install import install
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.registry import plugin_entries

VOCABULARY = 131
TOLERANCE = 1e-5
"""Largest difference of log-probabilities that is rounding of float32."""

COMMON: dict[str, Any] = {
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


def plugins(kind: str) -> list[Any]:
    """Return name and entry of each plug-in of a kind; those of RAG_POSFIX_PLUGINS are imported first."""
    from rag_posfix.settings import Settings  # needs pydantic, which the models here do not

    Settings()
    return [(name, entry) for name, entry, _ in plugin_entries(kind)]


def random_model(architecture: str = "Llama", **settings: Any) -> Any:
    """Return a small random float32 model of transformers; the same numbers for every call."""
    config = getattr(transformers, f"{architecture}Config")(**{**COMMON, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def hooked_model() -> LoadedModel:
    """Return the same Llama with the attention hook on it."""
    model = random_model()
    return LoadedModel(model, install(model))


def toy_layout(
    lengths: Sequence[int] = (7, 4, 9, 6),
    prefix: int = 5,
    suffix: int = 8,
    seed: int = 0,
    relevance: tuple[float, ...] | None = None,
) -> Layout:
    """Return a layout of random tokens; passage i holds the same tokens whatever the other lengths are."""

    def draw(count: int, salt: int) -> list[int]:
        generator = torch.Generator().manual_seed(1000 * seed + salt)
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    ids = draw(prefix, 1)
    passages, keys = [], []
    for i, length in enumerate(lengths):
        tokens = draw(length, 10 + i)
        passages.append(Span(len(ids), len(ids) + length))
        keys.append("-".join(map(str, tokens)))
        ids += tokens
    start = len(ids)
    ids += draw(suffix, 2)
    return Layout(
        token_ids=tuple(ids), prefix=Span(0, prefix), passages=tuple(passages), texts=tuple(passages),
        suffix=Span(start, len(ids)), question=Span(start + suffix // 4, len(ids) - suffix // 4),
        keys=tuple(keys), relevance=relevance,
    )  # fmt: skip
