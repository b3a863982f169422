"""Times one prompt in stock transformers or in rag_posfix and prints one JSON object.

Run by ``benchmarks.llama_cpp``. The config comes as JSON on stdin: ``name`` (``transformers`` or a method), ``model``,
``other``, ``prompt``, ``reordered`` (commands of ``generation.commands``, which hold the layouts), ``new_tokens``,
``threads``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from rag_posfix.caching.kv.memory import MemoryPassages
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.load import load_engine
from rag_posfix.generation.tensor_parallel.messages import Prefill, decode
from rag_posfix.patching.install import stock_copy
from rag_posfix.plan.layout import Layout

STOCK = "transformers"

Step = Callable[[int], int]
"""Reads a token and returns the one after it."""


def stock(engine: Engine) -> Callable[[Layout, int], tuple[int, Step]]:
    """Return what prefills a prompt with the stock model: its first token, and the decode step from there."""
    model = stock_copy(engine.loaded.model, engine.loaded.spec)

    def read(layout: Layout, new_tokens: int) -> tuple[int, Step]:
        output = model(torch.tensor([layout.token_ids]), use_cache=True, logits_to_keep=1)
        cache = output.past_key_values

        def step(token: int) -> int:
            logits = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits
            return int(logits[0, -1].argmax())

        return int(output.logits[0, -1].argmax()), step

    return read


def method(engine: Engine, name: str) -> Callable[[Layout, int], tuple[int, Step]]:
    """Return what reads a prompt with a method: its first token, and what goes on from it."""

    def read(layout: Layout, new_tokens: int) -> tuple[int, Step]:
        session = engine.open(layout, MitigationChoice(name), new_tokens + 1)

        def step(token: int) -> int:
            session.advance(token)
            return int(session.next_log_probs().argmax())

        return int(session.next_log_probs().argmax()), step

    return read


@torch.inference_mode()
def timed(read: Callable[[Layout, int], tuple[int, Step]], layout: Layout, new_tokens: int) -> dict[str, Any]:
    """Return seconds to the first token, tokens per second after it, and the tokens, greedily chosen."""
    started = time.perf_counter()
    token, step = read(layout, new_tokens)
    first = time.perf_counter()
    chosen = [token]
    for _ in range(new_tokens):
        chosen.append(step(chosen[-1]))
    seconds = time.perf_counter() - first
    return {"ttft_s": first - started, "decode_tokens_per_s": new_tokens / seconds, "tokens": chosen}


def layout_of(command: str) -> Layout:
    read = decode(command.encode())
    if not isinstance(read, Prefill):
        raise TypeError(f"the job holds {type(read).__name__} where a prompt is expected")
    return read.layout


def main() -> None:
    config = json.load(sys.stdin)
    torch.set_num_threads(config["threads"])
    engine = load_engine(config["model"], device="cpu")
    engine = engine.with_passages(PassageStore([MemoryPassages()]))  # as a pipeline has it; the stock model has none
    read = stock(engine) if config["name"] == STOCK else method(engine, config["name"])
    prompt, reordered = layout_of(config["prompt"]), layout_of(config["reordered"])
    timed(read, layout_of(config["other"]), 1)  # the first use maps the weights and starts the threads
    found = {
        "cold": timed(read, prompt, config["new_tokens"]),
        "again": timed(read, prompt, config["new_tokens"]),
        "reordered": timed(read, reordered, config["new_tokens"]),
    }
    about = {"dtype": str(engine.loaded.model.dtype).removeprefix("torch."), "fingerprint": engine.fingerprint}
    print(json.dumps({"times": found, "about": about}))


if __name__ == "__main__":
    main()
