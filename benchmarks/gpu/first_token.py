"""Part 2: first token cold and warm, tokens per second and memory of every method, against the stock model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu.bench import Bench, Cell, choice
from benchmarks.gpu.exactness import idle_is_identical
from benchmarks.gpu.models import Model, Size, random_layout
from benchmarks.gpu.timing import Reading, median, peak_bytes, read_method, read_stock, seconds
from rag_posfix.caching.kv.memory import MemoryPassages
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.patching.install import stock_copy
from rag_posfix.plan.layout import Layout

ASKED_METHODS = ("none", "parallel_encoding", "context_experts", "sorted_inter_document", "inter_document")
"""Measured first: the asks are about them."""

STORE_BYTES = 16 << 30
MEMORY_TOKENS = 2


def cells(bench: Bench) -> Iterator[Cell]:
    """Yield the cells: for each model and prompt the stock model, the idle hook, and every method."""
    methods = bench.scale.methods
    if methods is None:
        methods = (*ASKED_METHODS, *(name for name in MITIGATIONS.names() if name not in ASKED_METHODS))
    for model, size in bench.scale.cells:
        labels = {"model": model.name, "size": size.label}
        yield Cell({**labels, "method": "stock"}, partial(_stock, bench, model, size, None))
        if find_spec("flash_attn") is not None:
            yield Cell({**labels, "method": "stock_flash"}, partial(_stock, bench, model, size, "flash_attention_2"))
        yield Cell({**labels, "method": "idle"}, partial(_idle, bench, model, size))
        for name in methods:
            yield Cell({**labels, "method": name}, partial(_method, bench, model, size, name))


def _given(bench: Bench, model: Model, size: Size) -> tuple[Engine, Layout]:
    return bench.engine(model), random_layout(model.config["vocab_size"], size.lengths)


def _stock(bench: Bench, model: Model, size: Size, implementation: str | None) -> dict[str, Any]:
    """Time the stock model."""
    engine, layout = _given(bench, model, size)
    stock = stock_copy(engine.loaded.model, engine.loaded.spec)
    if implementation is not None:
        stock.set_attn_implementation(implementation)
    read_stock(stock, layout, MEMORY_TOKENS)
    extra = peak_bytes(lambda: read_stock(stock, layout, MEMORY_TOKENS), bench.device)
    readings = [read_stock(stock, layout, bench.scale.new_tokens) for _ in range(bench.scale.repeats + 1)]
    return {
        "attention": implementation or "sdpa",
        "prompt_tokens": len(layout.token_ids),
        **_medians(readings),
        "extra_bytes": extra,
    }


def _idle(bench: Bench, model: Model, size: Size) -> dict[str, Any]:
    """Time the model with the idle attention hook, in turns with the stock model."""
    engine, layout = _given(bench, model, size)
    loaded = engine.loaded
    stock = stock_copy(loaded.model, loaded.spec)
    read_stock(loaded.model, layout, MEMORY_TOKENS)
    ours, theirs = _in_turns(
        bench, lambda n: read_stock(loaded.model, layout, n), lambda n: read_stock(stock, layout, n)
    )
    return {**_medians(ours), **_ratios(ours, theirs), "identical": idle_is_identical(loaded, layout)}


def _method(bench: Bench, model: Model, size: Size, name: str) -> dict[str, Any]:
    """Time a method cold, in turns with the stock model, and warm, from keys and values on the device."""
    engine, layout = _given(bench, model, size)
    stock = stock_copy(engine.loaded.model, engine.loaded.spec)
    chosen = choice(name)
    read_method(engine, layout, chosen, MEMORY_TOKENS)
    extra = peak_bytes(lambda: read_method(engine, layout, chosen, MEMORY_TOKENS), bench.device)
    ours, theirs = _in_turns(
        bench, lambda n: read_method(engine, layout, chosen, n), lambda n: read_stock(stock, layout, n)
    )
    cold = {**_medians(ours), **_ratios(ours, theirs), "extra_bytes": extra}
    store = PassageStore([MemoryPassages(STORE_BYTES)], device=bench.device)
    try:
        return {**cold, **_warm(bench, engine.with_passages(store), layout, name, theirs)}
    finally:
        store.close()


def _warm(bench: Bench, engine: Engine, layout: Layout, name: str, stock: list[Reading]) -> dict[str, Any]:
    """Time the first token when prefix and passages are found; nothing where the method finds none."""
    engine.open(layout, choice(name))
    cached = engine.open(layout, choice(name)).cached_tokens
    if not cached:
        return {"cached_tokens": 0}
    warm = seconds(lambda: int(engine.open(layout, choice(name)).next_log_probs().argmax()), bench.device, 3)
    first = median([reading.first_s for reading in stock])
    return {"cached_tokens": cached, "warm_first_s": warm, "warm_ratio": warm / first}


def _in_turns(bench: Bench, method: Any, stock: Any) -> tuple[list[Reading], list[Reading]]:
    """Return readings of a method and of the stock model: every one of the method stands between two of the other."""
    ours, theirs = [], [stock(bench.scale.new_tokens)]
    for _ in range(bench.scale.repeats):
        ours.append(method(bench.scale.new_tokens))
        theirs.append(stock(bench.scale.new_tokens))
    return ours, theirs


def _medians(readings: list[Reading]) -> dict[str, float]:
    return {
        "first_s": median([reading.first_s for reading in readings]),
        "tokens_per_s": median([reading.tokens_per_s for reading in readings]),
    }


def _ratios(ours: list[Reading], theirs: list[Reading]) -> dict[str, float]:
    """Return a method's medians over those of the stock model beside it."""
    own, base = _medians(ours), _medians(theirs)
    return {
        "cold_ratio": own["first_s"] / base["first_s"],
        "decode_ratio": own["tokens_per_s"] / base["tokens_per_s"],
    }
