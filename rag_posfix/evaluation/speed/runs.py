"""What is timed: one prompt read and continued, by the stock model, by a method, or by several requests together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import torch

from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.generation.batching.session_batch import advance_batch
from rag_posfix.generation.engine import Engine
from rag_posfix.patching.install import stock_copy
from rag_posfix.plan.layout import Layout

__all__ = ["Run", "concurrent_run", "method_run", "stock_run", "with_store"]

Run: TypeAlias = Callable[[int], tuple[float, float]]
"""(new tokens) -> (seconds to the first token, seconds of the decode steps)."""


def with_store(engine: Engine, store: PassageStore | None) -> Engine:
    """Return the same engine with another passage store, or without one."""
    return engine.with_passages(store)


def stock_run(engine: Engine, layout: Layout) -> Run:
    """Return a run of transformers' own attention, its own cache and a plain loop. No mask, no plan, no observer."""
    model = stock_copy(engine.loaded.model, engine.loaded.spec)
    ids = torch.tensor([layout.token_ids], device=engine.loaded.device)

    @torch.inference_mode()
    def run(new_tokens: int) -> tuple[float, float]:
        started = _now(ids.device)
        output = model(ids, use_cache=True, logits_to_keep=1)
        token = int(output.logits[0, -1].argmax())
        first = _now(ids.device)
        for _ in range(new_tokens):
            step = torch.tensor([[token]], device=ids.device)
            output = model(step, past_key_values=output.past_key_values, use_cache=True)
            token = int(output.logits[0, -1].argmax())
        return first - started, _now(ids.device) - first

    return run


def method_run(engine: Engine, layout: Layout, choice: MitigationChoice, longest: int) -> Run:
    """Return a run of the method through the engine's public calls."""
    device = engine.loaded.device

    def run(new_tokens: int) -> tuple[float, float]:
        started = _now(device)
        session = engine.open(layout, choice, max(longest, new_tokens) + 1)
        token = int(session.next_log_probs().argmax())
        first = _now(device)
        for _ in range(new_tokens):
            session.advance(token)
            token = int(session.next_log_probs().argmax())
        return first - started, _now(device) - first

    return run


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def concurrent_run(engine: Engine, layout: Layout, choice: MitigationChoice, count: int) -> Callable[[int], float]:
    """Return a run of ``count`` equal requests that decode together: (new tokens) -> seconds of the decode steps."""
    device = engine.loaded.device

    def run(new_tokens: int) -> float:
        sessions = [engine.open(layout, choice, new_tokens + 1) for _ in range(count)]
        started = _now(device)
        for _ in range(new_tokens):
            advance_batch(sessions, [int(session.next_log_probs().argmax()) for session in sessions])
        return _now(device) - started

    return run
