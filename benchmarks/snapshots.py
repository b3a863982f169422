"""What snapshots of whole caches take and save: ``python -m benchmarks.snapshots [TYPE...] [--out RECORD]``.

A random model of each type has the heads and states of the defaults of its configuration, and few layers, channels,
experts and words. Bytes are those of bfloat16, counted for the layers of the full configuration. In float32 three
passages are read for ``default``, with a cold store and with a warm one; the logits are compared with those without.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
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
from rag_posfix.patching.install import prepare
from rag_posfix.patching.snapshots import SnapshotForm
from rag_posfix.patching.spec import PlainCache, PlainForward
from rag_posfix.plan.layout import Layout, Span

TYPES = (
    "qwen3_5_text", "qwen3_next", "nemotron_h", "kimi_linear", "lfm2", "falcon_h1", "gemma4_text", "deepseek_v4",
)  # fmt: skip
TOKENS = (128, 256)
"""Of prefix and passage: bytes are those of the first, and of a further token up to the last."""
NARROWED = (
    "vocab_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts",
    "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "n_shared_experts",
    "vocab_size_per_layer_input", "pad_token_id", "bos_token_id", "eos_token_id", "block_ff_dim",
)  # fmt: skip
CHANGES = {
    "kimi_linear": {"linear_num_heads": 32, "linear_head_dim": 128, "hidden_size": 256},
    "lfm2": {},  # its states are as wide as it is
}


def prompt() -> Layout:
    """Return a prompt of three passages of 128 tokens less the prefix, and a question of 16."""
    ids = torch.randint(
        3, SIZES["vocab_size"], (16 + 3 * 112 + 16,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    passages = tuple(Span(16 + 112 * i, 128 + 112 * i) for i in range(3))
    suffix = Span(len(ids) - 16, len(ids))
    return Layout(tuple(ids), Span(0, 16), passages, passages, suffix, suffix, ("a", "b", "c"), (0.9, 0.5, 0.2))


def snapshot_bytes(model_type: str, model: Any, n_tokens: int) -> int:
    """Return the bytes of a snapshot with all layers of the default configuration."""
    forward, cache = PlainForward.of(model, "measured"), PlainCache()
    forward(model, torch.arange(3, 3 + n_tokens)[None] % 128, cache, 1)
    form, sizes = SnapshotForm.of(cache.held), dict[str, int]()
    for layer in cache.held.layers:
        alone = form.save(type("Held", (), {"layers": [layer]})())
        sizes[type(layer).__name__] = max(len(alone), sizes.get(type(layer).__name__, 0))
    layers = DynamicCache(config=CONFIG_MAPPING[model_type]()).layers
    return sum(sizes.get(type(layer).__name__, 0) for layer in layers)


def first_token(loaded: LoadedModel, layout: Layout, store: PassageStore | None) -> tuple[torch.Tensor, float]:
    """Return the scores of the first token, and the seconds until it."""
    kv_lookup = None if store is None else KVLookup(store, "measured", "default", "")
    plan = create("default").checked_plan(layout, loaded.spec.shape)
    started = time.perf_counter()
    scores = Session(loaded, layout, plan, None, kv_lookup).next_log_probs()
    return scores, time.perf_counter() - started


@torch.inference_mode()
def measure(model_type: str) -> dict[str, Any]:
    """Return bytes, seconds with a cold and a warm store, and the difference of log-probabilities."""
    changes = CHANGES.get(model_type, {"hidden_size": 256})
    sizes = {name: SIZES[name] for name in NARROWED}
    model = tiny_model(
        tiny_config(model_type, {**changes, "num_hidden_layers": 4, "max_position_embeddings": 512}, sizes)
    )
    loaded, layout, store = LoadedModel(model, prepare(model)), prompt(), PassageStore([MemoryTier()])
    plain, seconds = first_token(loaded, layout, None)
    cold, cold_seconds = first_token(loaded, layout, store)
    warm, warm_seconds = first_token(loaded, layout, store)
    half = model.to(torch.bfloat16)
    few, many = (snapshot_bytes(model_type, half, n) for n in TOKENS)
    return {
        "bytes": few,
        "bytes_per_token": round((many - few) / (TOKENS[1] - TOKENS[0])),
        "seconds": round(seconds, 3),
        "cold_seconds": round(cold_seconds, 3),
        "warm_seconds": round(warm_seconds, 3),
        "same_bits": torch.equal(cold, warm),
        "difference": float((warm - plain).abs().max()),
        "joined": "" if loaded.spec.plain is None else loaded.spec.plain.joins,
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
