"""What snapshots of whole caches take and save: ``python -m benchmarks.snapshots [TYPE...] [--out RECORD]``.

Bytes are those of published models in bfloat16, from their layers, heads and states as they are written down here: no
configuration is read, and what is not written down is transformers' default. In
float32 a tiny random model of each type reads three passages for ``default``, with a cold store and with a warm one,
in processor seconds of one thread; the log-probabilities are compared with those without a store.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import CONFIG_MAPPING, DynamicCache

from benchmarks.chat_models import SIZES, tiny_config, tiny_model
from benchmarks.keep_record import RESULTS
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.evaluation.record import environment, read_head, save_record
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill.per_passage import KVLookup
from rag_posfix.mitigations import create
from rag_posfix.patching.install import prepare, snapshot_bytes
from rag_posfix.patching.spec import PlainForward
from rag_posfix.plan.layout import Layout, Span

_HYBRID = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
PUBLISHED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen/Qwen3.5-0.8B": ("qwen3_5_text", {
        "num_hidden_layers": 24, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 16,
    }),
    "Qwen/Qwen3.5-27B": ("qwen3_5_text", {
        "num_hidden_layers": 64, "num_key_value_heads": 4, "head_dim": 256, "linear_num_value_heads": 48,
    }),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("qwen3_next", {}),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("nemotron_h", {
        "layer_types": [{"M": "linear_attention", "E": "moe", "*": "full_attention"}[kind] for kind in _HYBRID],
        "num_key_value_heads": 2, "mamba_num_heads": 64,
    }),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": ("kimi_linear", {
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6 + ["linear_attention"] * 2
        + ["full_attention"],
        "linear_num_heads": 32, "linear_head_dim": 128,
    }),
    "LiquidAI/LFM2-1.2B": ("lfm2", {
        "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
        "hidden_size": 2048, "num_hidden_layers": 16, "num_key_value_heads": 8,
    }),
    "tiiuae/Falcon-H1-7B-Instruct": ("falcon_h1", {
        "num_hidden_layers": 44, "num_key_value_heads": 2, "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 24,
        "mamba_d_head": 128, "mamba_d_state": 256,
    }),
    "google/gemma-4-E2B-it": ("gemma4_text", {
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "num_key_value_heads": 1,
        "num_kv_shared_layers": 20, "num_hidden_layers": 35,
    }),
    "deepseek-ai/DeepSeek-V4-Flash": ("deepseek_v4", {}),
}  # fmt: skip
"""A published model of each family -> its type, and what its configuration has of what decides the cache."""
TYPES = tuple(dict.fromkeys(model_type for model_type, _ in PUBLISHED.values()))
TOKENS = (128, 256)
"""Of prefix and passage: bytes are those of the first, and of a further token up to the last."""
FURTHER = TOKENS[1] - TOKENS[0]
ROUNDS = 3
"""Of cold and warm first tokens in turn; seconds are medians."""
NARROWED = (
    "vocab_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts",
    "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "n_shared_experts",
    "vocab_size_per_layer_input", "pad_token_id", "bos_token_id", "eos_token_id", "block_ff_dim", "q_lora_rank",
    "hidden_size_per_layer_input",
)  # fmt: skip
"""What does not decide the cache."""


def prompt() -> Layout:
    """Return a prompt of three passages of 128 tokens less the prefix, and a question of 16."""
    ids = torch.randint(
        3, SIZES["vocab_size"], (16 + 3 * 112 + 16,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    passages = tuple(Span(16 + 112 * i, 128 + 112 * i) for i in range(3))
    suffix = Span(len(ids) - 16, len(ids))
    return Layout(tuple(ids), Span(0, 16), passages, passages, suffix, suffix, ("a", "b", "c"), (0.9, 0.5, 0.2))


def published_bytes(name: str) -> tuple[int, ...]:
    """Return the bytes of a snapshot of a published model in bfloat16, after each number of ``TOKENS``.

    A model with one narrow layer of each kind is read; its layers are counted as those of the configuration.
    """
    model_type, settings = PUBLISHED[name]
    full = CONFIG_MAPPING[model_type](**settings)
    kinds = list(dict.fromkeys(full.layer_types))
    changes = {"hidden_size": 256, **settings, "num_hidden_layers": len(kinds), "max_position_embeddings": 512}
    changes |= {"num_kv_shared_layers": 0} if "num_kv_shared_layers" in settings else {}
    changes |= {"layer_types": kinds} if len(kinds) > 1 else {}
    changes |= {"mlp_layer_types": full.mlp_layer_types[: len(kinds)]} if hasattr(full, "mlp_layer_types") else {}
    model = tiny_model(tiny_config(model_type, changes, {name: SIZES[name] for name in NARROWED})).to(torch.bfloat16)
    layers, totals = DynamicCache(config=full).layers, list[int]()
    for n_tokens in TOKENS:
        sizes = dict(snapshot_bytes(model, PlainForward.of(model, "measured"), n_tokens))
        totals.append(sum(sizes.get(type(layer).__name__, 0) for layer in layers))
    return tuple(totals)


def first_token(loaded: LoadedModel, layout: Layout, store: PassageStore | None) -> tuple[torch.Tensor, float]:
    """Return the scores of the first token, and the processor seconds until it."""
    kv_lookup = None if store is None else KVLookup(store, "measured", "default", "")
    plan = create("default").checked_plan(layout, loaded.spec.shape)
    started = time.process_time()
    scores = Session(loaded, layout, plan, None, kv_lookup).next_log_probs()
    return scores, time.process_time() - started


@torch.inference_mode()
def measure(model_type: str) -> dict[str, Any]:
    """Return bytes, seconds with a cold and a warm store, and the difference of log-probabilities."""
    model = tiny_model(tiny_config(model_type, {"max_position_embeddings": 512}))
    loaded, layout, seconds = LoadedModel(model, prepare(model)), prompt(), list[tuple[float, float, float]]()
    for _ in range(ROUNDS):
        store = PassageStore([MemoryTier()])
        (plain, alone), (cold, first), (warm, second) = (first_token(loaded, layout, s) for s in (None, store, store))
        seconds.append((alone, first, second))
    medians = [round(median(each), 4) for each in zip(*seconds, strict=True)]
    return {
        **dict(zip(("seconds", "cold_seconds", "warm_seconds"), medians, strict=True)),
        "same_bits": torch.equal(cold, warm),
        "difference": float((warm - plain).abs().max()),
        "joined": "" if loaded.spec.unhooked is None else loaded.spec.unhooked.joins,
        "published": {
            name: {"bytes": (few := published_bytes(name))[0], "bytes_per_token": round((few[1] - few[0]) / FURTHER)}
            for name, (of, _) in PUBLISHED.items()
            if of == model_type
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "types", nargs="*", help="model types; all if none is named, else the others keep their entries"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "snapshots.json")
    options = parser.parse_args(arguments)
    is_new = not options.types or not options.out.exists()
    models: dict[str, Any] = {} if is_new else read_head(options.out)["summary"]["models"]
    for model_type in options.types or TYPES:
        models[model_type] = measure(model_type)
        print(model_type, models[model_type], flush=True)
        save_record(
            options.out, {"kind": "snapshots", "summary": {"models": models}, "environment": environment()}, None
        )


if __name__ == "__main__":
    main()
