"""Part 4: several requests that decode together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.bench import Bench, Cell, choice
from benchmarks.gpu.models import random_layout
from benchmarks.gpu.timing import now
from rag_posfix.contracts.request import Sampling
from rag_posfix.generation.batching.session_batch import advance_batch
from rag_posfix.generation.decode.answer_writer import Sampler, choose_together

METHODS = ("none", "parallel_encoding", "context_experts")


def cells(bench: Bench) -> Iterator[Cell]:
    """Yield the cells: every method with every number of requests."""
    for method in METHODS:
        for count in bench.scale.batches:
            labels = {"model": bench.scale.model.name, "size": bench.scale.several.label, "method": method}
            yield Cell({**labels, "requests": count}, partial(_together, bench, method, count))


def _together(bench: Bench, method: str, count: int) -> dict[str, Any]:
    """Time the decode steps of equal requests that share them."""
    engine = bench.engine(bench.scale.model)
    layout = random_layout(bench.scale.model.config["vocab_size"], bench.scale.several.lengths)
    steps = 2 * bench.scale.new_tokens
    sessions = [engine.open(layout, choice(method), steps + 4) for _ in range(count)]

    samplers = [Sampler(Sampling())] * count

    def step() -> None:
        scores = [session.next_log_probs() for session in sessions]
        advance_batch(sessions, choose_together(samplers, scores))

    for _ in range(2):
        step()
    started = now(bench.device)
    for _ in range(steps):
        step()
    taken = now(bench.device) - started
    return {"step_s": taken / steps, "tokens_per_s": count * steps / taken}
