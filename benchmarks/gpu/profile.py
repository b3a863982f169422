"""Part 5: what a prompt and a decode step spend their time on: kernels, and the time outside of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Cell, choice
from benchmarks.gpu.models import random_layout
from benchmarks.gpu.synchronisations import count_synchronisations
from benchmarks.gpu.timing import seconds

METHODS = ("none", "context_experts", "inter_document")
TOP = 15


def cells(bench: Bench) -> Iterator[Cell]:
    """Yield the cells: decode steps of every method, then the prompt."""
    for phase in (_decode, _prefill):
        for method in METHODS:
            labels = {"model": bench.scale.model.name, "size": bench.scale.asked.label, "method": method}
            yield Cell({**labels, "phase": phase.__name__.strip("_")}, partial(phase, bench, method))


def _prefill(bench: Bench, method: str) -> dict[str, Any]:
    engine = bench.engine(bench.scale.model)
    layout = random_layout(bench.scale.model.config["vocab_size"], bench.scale.asked.lengths)
    return _profiled(bench, engine.loaded.model, lambda: engine.open(layout, choice(method)).next_log_probs(), 1)


def _decode(bench: Bench, method: str) -> dict[str, Any]:
    engine, steps = bench.engine(bench.scale.model), bench.scale.new_tokens
    layout = random_layout(bench.scale.model.config["vocab_size"], bench.scale.asked.lengths)
    session = engine.open(layout, choice(method), 16 * steps)

    def run() -> None:
        for _ in range(steps):
            session.advance(int(session.next_log_probs().argmax()))

    return _profiled(bench, engine.loaded.model, run, steps)


def _profiled(bench: Bench, model: Any, action: Callable[[], object], steps: int) -> dict[str, Any]:
    """Return seconds per step, seconds in kernels, the share of time outside of them, and the kernels that take most.

    Time is measured without the profiler, which slows the host down. On a CPU operations stand for kernels.
    """
    taken = seconds(action, bench.device, 2)
    on_gpu = bench.device.type == "cuda"
    waits = count_synchronisations(action, model, bench.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        action()
        if on_gpu:
            torch.cuda.synchronize(bench.device)
    kernels = [(event.key, event.count, _own_seconds(event, on_gpu)) for event in profile.key_averages()]
    kernels = sorted((kernel for kernel in kernels if kernel[2] > 0), key=lambda kernel: -kernel[2])
    inside = sum(kernel[2] for kernel in kernels)
    return {
        "step_s": taken / steps,
        "kernel_s": inside / steps,
        "outside_kernels": max(0.0, 1.0 - inside / taken),
        "kernels_per_step": sum(kernel[1] for kernel in kernels) / steps,
        "synchronisations_per_step": waits / steps,
        "top": [
            {"kernel": name[:160], "calls": count / steps, "step_s": own / steps, "share": own / inside}
            for name, count, own in kernels[:TOP]
        ],
    }


def _own_seconds(event: Any, on_gpu: bool) -> float:
    if not on_gpu:
        return float(event.self_cpu_time_total) / 1e6
    kernel = event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    return float(event.self_device_time_total) / 1e6 if kernel else 0.0
