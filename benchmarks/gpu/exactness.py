"""Part 1: every method gives on the device what it gives on the CPU in float32, whatever the order of the passages.

Tolerances are on log-probabilities, the largest difference over the vocabulary and five tokens. In float32 sums are
taken in another order: 1e-4. In bfloat16 weights and states have 8 bits: on the small models of this part the CPU's
own bfloat16 is up to 0.04 away from float32, and 0.1 is allowed. Methods that rank passages or rows by what they
compute (``RANKING``) may rank two near ones the other way in bfloat16: their difference is recorded and not judged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Cell, choice
from benchmarks.gpu.models import Model, engine_of, loaded_model, random_layout
from rag_posfix.attention.blockwise import attend_with_lse
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.patching.install import stock_copy
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import ModelShape

FLOAT32, BF16 = 1e-4, 0.1
LENGTHS = (7, 4, 9, 6)
TOKENS = (5, 9, 11, 20)
RANKING = frozenset({"calibrated_attention", "head_scaling", "inter_document", "passage_answers", "stack"})


class Exactness:
    """A small model on the CPU in float32 and on a device, and what differs between them."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._model, self._device = model, device
        self._layout = random_layout(model.config["vocab_size"], LENGTHS)
        self._engines: dict[tuple[torch.device, torch.dtype], Engine] = {}

    def engine(self, device: torch.device, dtype: torch.dtype) -> Engine:
        """Return the model with the same weights on any device in any dtype."""
        if (device, dtype) not in self._engines:
            self._engines[device, dtype] = engine_of(loaded_model(self._model, device, dtype), self._model.name)
        return self._engines[device, dtype]

    @property
    def shape(self) -> ModelShape:
        """The model shape that methods plan for."""
        return self.engine(torch.device("cpu"), torch.float32).loaded.spec.shape

    def method(self, name: str) -> dict[str, Any]:
        """Compare a method's log-probabilities with those of the CPU in float32."""
        expected = _log_probs(self.engine(torch.device("cpu"), torch.float32), self._layout, name)
        float32 = _difference(_log_probs(self.engine(self._device, torch.float32), self._layout, name), expected)
        bf16 = _difference(_log_probs(self.engine(self._device, torch.bfloat16), self._layout, name), expected)
        judged = name not in RANKING
        return {
            "float32_difference": float32,
            "bf16_difference": bf16,
            "bf16_judged": judged,
            "passed": float32 <= FLOAT32 and (bf16 <= BF16 or not judged),
        }

    def orders(self, name: str) -> dict[str, Any]:
        """Compare a method's log-probabilities of the next token over all orders of the passages, on the device."""
        engine = self.engine(self._device, torch.float32)
        base = engine.next_log_probs(self._layout, choice(name))
        largest = 0.0
        for order in itertools.permutations(range(len(LENGTHS))):
            log_probs = engine.next_log_probs(self._layout.select(order), choice(name))
            largest = max(largest, _difference(log_probs, base))
        return {"float32_difference": largest, "passed": largest <= FLOAT32}

    def idle(self, dtype: torch.dtype) -> dict[str, Any]:
        """Compare the model with the idle attention hook and the stock model with sdpa, bit for bit."""
        same = idle_is_identical(self.engine(self._device, dtype).loaded, self._layout)
        return {"identical": same, "passed": same}


@torch.inference_mode()
def idle_is_identical(loaded: LoadedModel, layout: Layout) -> bool:
    """Return whether prompt and one decoded token have the logits of the stock model, bit for bit."""
    stock = stock_copy(loaded.model, loaded.spec)
    ids = torch.tensor([layout.token_ids], device=loaded.device)
    models = (loaded.model, stock)
    prompts = [model(ids, use_cache=True, logits_to_keep=1) for model in models]
    token = prompts[1].logits[:, -1:].argmax(-1)
    steps = [
        model(token, past_key_values=prompt.past_key_values, use_cache=True)
        for model, prompt in zip(models, prompts, strict=True)
    ]
    return all(torch.equal(hooked.logits, unhooked.logits) for hooked, unhooked in (prompts, steps))


def kernel(device: torch.device, dtype: torch.dtype, n_query: int, n_key: int) -> dict[str, Any]:
    """Compare attention with its log-sum-exp, causal, with fewer key heads, with the CPU in float32."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, 8, n_query, 64, generator=random)
    key, value = (torch.randn(1, 2, n_key, 64, generator=random) for _ in range(2))
    expected = attend_with_lse(query, key, value, 0.125, causal=True)
    query, key, value = (states.to(device, dtype) for states in (query, key, value))
    computed = attend_with_lse(query, key, value, 0.125, causal=True)
    largest = max(_difference(*pair) for pair in zip(computed, expected, strict=True))
    return {"difference": largest, "passed": largest <= (FLOAT32 if dtype is torch.float32 else BF16)}


def cells(bench: Bench) -> Iterator[Cell]:
    """Yield the cells: the kernel, the idle hook, every method, every order."""
    for dtype in (torch.float32, torch.bfloat16):
        for n_query, n_key in ((300, 300), (40, 300), (1, 300)):
            labels = {"check": "kernel", "dtype": str(dtype).removeprefix("torch."), "queries": n_query, "keys": n_key}
            yield Cell(labels, partial(kernel, bench.device, dtype, n_query, n_key))
    methods = bench.scale.methods or MITIGATIONS.names()
    for model in bench.scale.exact:
        exactness = Exactness(model, bench.device)
        for dtype in (torch.float32, torch.bfloat16):
            labels = {"model": model.name, "check": "idle", "dtype": str(dtype).removeprefix("torch.")}
            yield Cell(labels, partial(exactness.idle, dtype))
        invariant = [name for name in methods if MITIGATIONS.get(name).order_invariant]
        checks = (("method", exactness.method, methods), ("orders", exactness.orders, invariant))
        for check, measure, names in checks:
            for name in names:
                yield Cell({"model": model.name, "check": check, "method": name}, partial(measure, name))


def _log_probs(engine: Engine, layout: Layout, name: str) -> torch.Tensor:
    """Return the log-probabilities after the prompt and after each token of ``TOKENS``, on the CPU."""
    session = engine.open(layout, choice(name), len(TOKENS) + 1)
    log_probs = [session.next_log_probs().cpu()]
    for token in TOKENS:
        session.advance(token)
        log_probs.append(session.next_log_probs().cpu())
    return torch.stack(log_probs)


def _difference(computed: torch.Tensor, expected: torch.Tensor) -> float:
    return float((computed.float().cpu() - expected.float().cpu()).abs().max())
