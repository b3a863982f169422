"""What a decode step spends its time on.

    python -m benchmarks.decode_profile [METHOD [REQUESTS]]

Prints milliseconds per step by operation for requests of 20 passages of 150 tokens that decode together, how fast this
machine reads memory, and what one-row products cost with stock and with prepacked weights.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from rag_posfix.caching.kv.memory import MemoryPassages
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.evaluation.speed.runs import bench_layout
from rag_posfix.generation.batching.session_batch import advance_batch
from rag_posfix.generation.load import load_engine

STEPS, ROWS = 8, 12


def fastest(action: Callable[[], object], times: int = 5) -> float:
    """Return the least seconds that ``action`` took."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        found.append(time.perf_counter() - started)
    return min(found)


@torch.inference_mode()
def machine() -> None:
    """Print what the machine allows."""
    block = torch.randn(100_000_000)
    print(f"memory is read at {block.nbytes / fastest(block.sum) / 1e9:.1f} GB/s")
    weights = [torch.randn(1536, 576).bfloat16() for _ in range(90)]  # more than any cache holds
    state = torch.randn(1, 576).bfloat16()
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 1) for weight in weights]
    stock = fastest(lambda: [torch.nn.functional.linear(state, weight) for weight in weights])
    ahead = fastest(
        lambda: [torch.ops.mkldnn._linear_pointwise(state, weight, None, "none", [], "") for weight in packed]
    )
    print(f"90 one-row products of 1536 x 576: {stock * 1e3:.1f} ms, with prepacked weights {ahead * 1e3:.1f} ms")


def main() -> None:
    """Print both."""
    name = sys.argv[1] if len(sys.argv) > 1 else "none"
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    engine = load_engine()
    engine = engine.with_passages(PassageStore([MemoryPassages(2 * 1024**3)]))
    layout = bench_layout(engine.encoder, 20, 150)
    sessions = [engine.open(layout, MitigationChoice(name), 2 * STEPS) for _ in range(count)]
    for token in range(3):
        advance_batch(sessions, [100 + token] * count)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for token in range(STEPS):
            advance_batch(sessions, [200 + token] * count)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    print(f"{name}, {count} together: {total / STEPS / 1e3:.1f} ms a step, of which")
    for event in events[:ROWS]:
        print(f"{event.self_cpu_time_total / STEPS / 1e3:8.2f} ms  {event.key}")
    machine()


if __name__ == "__main__":
    main()
