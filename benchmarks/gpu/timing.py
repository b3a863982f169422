"""Seconds and bytes of a piece of work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.generation.engine import Engine
from rag_posfix.plan.layout import Layout


def now(device: torch.device) -> float:
    """Return the time when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of an action, after one that is not counted."""
    action()
    found = []
    for _ in range(repeats):
        started = now(device)
        action()
        found.append(now(device) - started)
    return median(found)


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def peak_bytes(action: Callable[[], object], device: torch.device) -> int | None:
    """Run an action and return the most memory that tensors took during it, beyond what was held; None on a CPU."""
    if device.type != "cuda":
        action()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@dataclass(frozen=True)
class Reading:
    """One prompt, read and continued: seconds until the first token, and tokens per second after it."""

    first_s: float
    tokens_per_s: float


@torch.inference_mode()
def read_stock(model: Any, layout: Layout, new_tokens: int) -> Reading:
    """Time a model of transformers: its own attention, its own cache and a plain greedy loop."""
    device: torch.device = model.device
    started = now(device)
    ids = torch.tensor([layout.token_ids], device=device)
    output = model(ids, use_cache=True, logits_to_keep=1)
    token = int(output.logits[0, -1].argmax())
    first = now(device)
    for _ in range(new_tokens):
        step = torch.tensor([[token]], device=device)
        output = model(step, past_key_values=output.past_key_values, use_cache=True)
        token = int(output.logits[0, -1].argmax())
    return Reading(first - started, new_tokens / (now(device) - first))


def read_method(engine: Engine, layout: Layout, choice: MitigationChoice, new_tokens: int) -> Reading:
    """Time a method through the engine's public calls, with the same greedy loop."""
    device = engine.loaded.device
    started = now(device)
    session = engine.open(layout, choice, new_tokens + 1)
    token = int(session.next_log_probs().argmax())
    first = now(device)
    for _ in range(new_tokens):
        session.advance(token)
        token = int(session.next_log_probs().argmax())
    return Reading(first - started, new_tokens / (now(device) - first))
