"""What the attention hook costs a model that is not using it: prefill and decode, patched / stock, in one process.

make bench            prints one JSON object; ratios are medians of paired runs, 1.0 is "costs nothing"
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch

from rag_posfix.generation.load import load_engine
from rag_posfix.patching.install import ATTENTION_NAME

PROMPT_TOKENS, NEW_TOKENS, PAIRS = 1024, 16, 7


@torch.inference_mode()
def seconds(model: Any, implementation: str, ids: torch.Tensor) -> tuple[float, float]:
    """Return seconds of one prefill and of one decode step."""
    model.set_attn_implementation(implementation)
    started = time.perf_counter()
    output = model(ids, use_cache=True, logits_to_keep=1)
    prefilled = time.perf_counter()
    for _ in range(NEW_TOKENS):
        token = output.logits[:, -1:].argmax(-1)
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
    return prefilled - started, (time.perf_counter() - prefilled) / NEW_TOKENS


def main() -> None:
    engine = load_engine()
    model = engine.loaded.model
    ids = torch.randint(0, engine.encoder.vocab_size, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    for implementation in ("sdpa", ATTENTION_NAME):
        seconds(model, implementation, ids)  # warm-up
    ratios: list[tuple[float, ...]] = []
    stock: list[tuple[float, float]] = []
    for pair in range(PAIRS):
        order = ("sdpa", ATTENTION_NAME) if pair % 2 else (ATTENTION_NAME, "sdpa")  # neither always goes first
        found = {implementation: seconds(model, implementation, ids) for implementation in order}
        stock.append(found["sdpa"])
        ratios.append(tuple(a / b for a, b in zip(found[ATTENTION_NAME], found["sdpa"], strict=True)))
    prefill, decode = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(
        json.dumps(
            {
                "model": engine.model_id,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": str(model.device),
                "prompt_tokens": PROMPT_TOKENS,
                "pairs": PAIRS,
                "unmodified": {
                    "prefill_s": statistics.median(s[0] for s in stock),
                    "decode_step_s": statistics.median(s[1] for s in stock),
                },
                "idle_prefill_ratio": prefill,
                "idle_decode_ratio": decode,
            }
        )
    )


if __name__ == "__main__":
    main()
