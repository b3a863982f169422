"""Parts 2 to 5: first tokens of every method, passage KV stores, requests that decode together, and profiles.

Part 1: every method gives on the device what it gives on the CPU in float32, whatever the order of the passages.

Tolerances are on log-probabilities, the largest difference over the vocabulary and five tokens. In float32 sums are
taken in another order: 1e-4. In bfloat16 weights and states have 8 bits: on the small models of this part the CPU's
own bfloat16 is up to 0.04 away from float32, and 0.1 is allowed. Methods that rank passages or rows by what they
compute (``RANKING``) may rank two near ones the other way in bfloat16: their difference is recorded and not judged.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.bench import (
    Bench,
    Cell,
    Reading,
    Row,
    choice,
    peak_bytes,
    read_method,
    read_stock,
    seconds,
    synchronized_time,
)
from benchmarks.gpu.models import Model, Size, engine_of, loaded_model, random_layout
from rag_posfix.attention.masks import attend_with_lse
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv.store import KVCodec, PassageKV, PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import Sampling
from rag_posfix.generation.batching.scheduler import advance_batch
from rag_posfix.generation.decode.answer_writer import Sampler, choose_together
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill.per_passage import KVLookup, encode_passages, resolve
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


def exactness_cells(bench: Bench) -> Iterator[Cell]:
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


_READS = dict.fromkeys(("item", "__int__", "__float__", "__bool__", "__index__"), "item")
_READS.update(tolist="tolist", cpu="cpu", numpy="numpy")
"""Methods of tensors that read values, which a dispatch mode does not see everywhere."""

_aten: Any = torch.ops.aten
_WAITING = {
    _aten.nonzero.default: "nonzero",
    _aten.masked_select.default: "masked_select",
    _aten.equal.default: "equal",
    _aten.repeat_interleave.Tensor: "repeat_interleave",
    _aten.unique_dim.default: "unique",
    _aten._unique2.default: "unique",
}
"""Operations that make the host wait for a result or its size."""


class Synchronisations:
    """Counts inside of a ``with`` block, on any device, what would make the host wait for a GPU.

    Counted are values that are read (``item``, ``tolist``, ``cpu``, comparisons and sizes that depend on values) and
    uploads: tensors that are made from Python lists, and ``to`` with a device, which copies if the tensor is
    elsewhere. A CPU cannot tell whether it would, so every such call counts but those of ``model``'s own tensors.
    ``counts`` are by name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.counts: Counter[str] = Counter()
        on_device = frozenset(_storage(tensor) for tensor in chain(model.parameters(), model.buffers()))
        self._modes: tuple[Any, ...] = (_Functions(self.counts, on_device), _Operations(self.counts))
        self._entered = ExitStack()

    @property
    def total(self) -> int:
        """Return the sum of the counts."""
        return self.counts.total()

    def __enter__(self) -> Synchronisations:
        for mode in self._modes:
            self._entered.enter_context(mode)
        return self

    def __exit__(self, *_error: Any) -> None:
        self._entered.close()


class _Functions(TorchFunctionMode):
    """Counts what is called from Python."""

    def __init__(self, counts: Counter[str], on_device: frozenset[int]) -> None:
        super().__init__()
        self._counts, self._on_device = counts, on_device

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _READS and args and isinstance(args[0], Tensor):
            self._counts[_READS[name]] += 1
        elif func is torch.tensor:
            self._counts["tensor from a list"] += 1
        elif name == "to" and (_names_device(args[1:]) or "device" in options):
            self._counts["to a device"] += _storage(args[0]) not in self._on_device
        return func(*args, **options)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, those inside of other calls included."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _WAITING:
            self._counts[_WAITING[func]] += 1
        elif func in (_aten.index.Tensor, _aten.index_put_.default) and any(map(_is_mask, args[1])):
            self._counts["boolean index"] += 1
        return func(*args, **(kwargs or {}))


def count_synchronisations(action: Callable[[], object], model: torch.nn.Module, device: torch.device) -> int:
    """Return how often an action makes the host wait: by torch's warnings on a GPU, else by ``Synchronisations``."""
    if device.type != "cuda":
        with Synchronisations(model) as counted:
            action()
        return counted.total
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchroniz" in str(warning.message) for warning in warned)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _names_device(arguments: Sequence[Any]) -> bool:
    return any(isinstance(argument, str | torch.device) for argument in arguments)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype is torch.bool


ASKED_METHODS = ("none", "parallel_encoding", "context_experts", "sorted_inter_document", "inter_document")
"""Measured first: the asks are about them."""

BATCH_METHODS = ("none", "parallel_encoding", "context_experts")
PROFILE_METHODS = ("none", "context_experts", "inter_document")
STORE_METHOD = "parallel_encoding"
STORE_BYTES = 16 << 30
STORE_REPEATS = 3
MEMORY_TOKENS = 2
TOP_KERNELS = 15


def first_token_cells(bench: Bench) -> Iterator[Cell]:
    """Yield the cells of part 2: for each model and prompt the stock model, the idle hook, and every method."""
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


def _engine_and_layout(bench: Bench, model: Model, size: Size) -> tuple[Engine, Layout]:
    return bench.engine(model), random_layout(model.config["vocab_size"], size.lengths)


def _stock(bench: Bench, model: Model, size: Size, implementation: str | None) -> Row:
    engine, layout = _engine_and_layout(bench, model, size)
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


def _idle(bench: Bench, model: Model, size: Size) -> Row:
    """Time the model with the idle attention hook, in turns with the stock model."""
    engine, layout = _engine_and_layout(bench, model, size)
    loaded = engine.loaded
    read_stock(loaded.model, layout, MEMORY_TOKENS)
    row, _ = _against_stock(bench, engine, layout, lambda n: read_stock(loaded.model, layout, n))
    return {**row, "identical": idle_is_identical(loaded, layout)}


def _method(bench: Bench, model: Model, size: Size, name: str) -> Row:
    """Time a method cold, in turns with the stock model, and warm, from keys and values on the device."""
    engine, layout = _engine_and_layout(bench, model, size)
    chosen = choice(name)
    read_method(engine, layout, chosen, MEMORY_TOKENS)
    extra = peak_bytes(lambda: read_method(engine, layout, chosen, MEMORY_TOKENS), bench.device)
    row, stock_first_s = _against_stock(bench, engine, layout, lambda n: read_method(engine, layout, chosen, n))
    row["extra_bytes"] = extra
    store = PassageStore([MemoryTier(STORE_BYTES)], device=bench.device)
    try:
        warm_engine = engine.with_passages(store)
        warm_engine.open(layout, chosen)
        row["cached_tokens"] = warm_engine.open(layout, chosen).cached_tokens
        if row["cached_tokens"]:
            warm = seconds(lambda: int(warm_engine.open(layout, chosen).next_log_probs().argmax()), bench.device, 3)
            row |= {"warm_first_s": warm, "warm_ratio": warm / stock_first_s}
        return row
    finally:
        store.close()


def _against_stock(bench: Bench, engine: Engine, layout: Layout, read: Callable[[int], Reading]) -> tuple[Row, float]:
    """Return medians of readings, each between two of the stock model, their ratios, and the stock's first token."""
    stock = stock_copy(engine.loaded.model, engine.loaded.spec)
    method_readings, stock_readings = [], [read_stock(stock, layout, bench.scale.new_tokens)]
    for _ in range(bench.scale.repeats):
        method_readings.append(read(bench.scale.new_tokens))
        stock_readings.append(read_stock(stock, layout, bench.scale.new_tokens))
    method, baseline = _medians(method_readings), _medians(stock_readings)
    ratios = {
        "cold_ratio": method["first_s"] / baseline["first_s"],
        "decode_ratio": method["tokens_per_s"] / baseline["tokens_per_s"],
    }
    return {**method, **ratios}, baseline["first_s"]


def _medians(readings: list[Reading]) -> dict[str, float]:
    return {
        "first_s": statistics.median(reading.first_s for reading in readings),
        "tokens_per_s": statistics.median(reading.tokens_per_s for reading in readings),
    }


class PinnedPassages(MemoryTier[PassageKV]):
    """The memory tier with its entries in pinned host memory, from which the device copies by itself."""

    def put_many(self, entries: Mapping[str, PassageKV]) -> None:
        """Keep copies of ``entries`` in pinned memory."""
        super().put_many({key: replace(entry, kv=_pin(entry.kv)) for key, entry in entries.items()})


def _pin(states: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory; in ordinary memory where there is no GPU."""
    host = states.cpu()
    return host.pin_memory() if torch.cuda.is_available() else host


def store_cells(bench: Bench) -> Iterator[Cell]:
    """Yield the cells of part 3: bytes per second of the bus, then of a passage KV store in each kind of memory."""
    for name in ("pinned", "pageable"):
        for direction in ("to device", "from device"):
            labels = {"what": "copy", "memory": name, "direction": direction}
            yield Cell(labels, partial(_bus, bench, name == "pinned", direction == "to device"))
    yield Cell({"what": "copy", "memory": "device", "direction": "on device"}, partial(_on_device, bench))
    for memory in ("device", "pinned host", "host", "disk"):
        yield Cell({"what": "store", "place": memory, "method": STORE_METHOD}, partial(_store, bench, memory))


def _bus(bench: Bench, pinned: bool, to_device: bool) -> Row:
    """Time copies of one large block between host and device."""
    host = torch.empty(bench.scale.copied_bytes, dtype=torch.uint8)
    host = _pin(host) if pinned else host
    device = torch.empty_like(host, device=bench.device)
    source, target = (host, device) if to_device else (device, host)
    return _copy_rate(bench, source.nbytes, lambda: target.copy_(source, non_blocking=pinned))


def _on_device(bench: Bench) -> Row:
    source = torch.empty(bench.scale.copied_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return _copy_rate(bench, source.nbytes, lambda: target.copy_(source))


def _copy_rate(bench: Bench, n_bytes: int, action: Callable[[], object]) -> Row:
    elapsed = seconds(action, bench.device, STORE_REPEATS)
    return {"bytes": n_bytes, "copy_s": elapsed, "bytes_per_s": n_bytes / elapsed}


def _store(bench: Bench, memory: str) -> Row:
    """Time how long a store takes to bring prefix and passages to the device, and the first token after it."""
    engine, layout = _engine_and_layout(bench, bench.scale.model, bench.scale.ask_size)
    chosen = choice(STORE_METHOD)
    with TemporaryDirectory(prefix="rag-posfix-gpu-") as folder:
        store = _open_store(bench, memory, Path(folder))
        warm_engine = engine.with_passages(store)
        lookup = KVLookup(store, engine.fingerprint, engine.describe(chosen).fingerprint)
        rows = [resolve(row, layout, engine.loaded.device) for row in warm_engine.plan(layout, chosen, 1).rows]

        @torch.inference_mode()
        def find() -> dict[Any, torch.Tensor]:
            return encode_passages(engine.loaded, layout, rows, lookup)[0]

        try:
            warm_engine.open(layout, chosen)
            store.flush(300.0)
            cached_tokens = warm_engine.open(layout, chosen).cached_tokens
            n_bytes = sum(states.nbytes for states in find().values())
            elapsed = seconds(find, bench.device, STORE_REPEATS)
            first = seconds(
                lambda: int(warm_engine.open(layout, chosen).next_log_probs().argmax()), bench.device, STORE_REPEATS
            )
        finally:
            store.close()
    return {
        "cached_tokens": cached_tokens, "bytes": n_bytes, "find_s": elapsed, "bytes_per_s": n_bytes / elapsed,
        "warm_first_s": first,
    }  # fmt: skip


def _open_store(bench: Bench, memory: str, folder: Path) -> PassageStore:
    if memory == "disk":
        disk = DiskTier(folder, KVCodec(), max_bytes=STORE_BYTES)
        return PassageStore([disk], device=bench.device, queue_bytes=STORE_BYTES)
    tier = PinnedPassages if memory == "pinned host" else MemoryTier
    return PassageStore([tier(STORE_BYTES)], device=bench.device if memory == "device" else "cpu")


def batch_cells(bench: Bench) -> Iterator[Cell]:
    """Yield the cells of part 4: every method with every number of requests."""
    for method in BATCH_METHODS:
        for count in bench.scale.batches:
            labels = {"model": bench.scale.model.name, "size": bench.scale.several.label, "method": method}
            yield Cell({**labels, "requests": count}, partial(_together, bench, method, count))


def _together(bench: Bench, method: str, count: int) -> Row:
    """Time the decode steps of equal requests that share them."""
    engine, layout = _engine_and_layout(bench, bench.scale.model, bench.scale.several)
    steps = 2 * bench.scale.new_tokens
    sessions = [engine.open(layout, choice(method), steps + 4) for _ in range(count)]
    samplers = [Sampler(Sampling())] * count

    def step() -> None:
        scores = [session.next_log_probs() for session in sessions]
        advance_batch(sessions, choose_together(samplers, scores))

    for _ in range(2):
        step()
    started = synchronized_time(bench.device)
    for _ in range(steps):
        step()
    elapsed = synchronized_time(bench.device) - started
    return {"step_s": elapsed / steps, "tokens_per_s": count * steps / elapsed}


def profile_cells(bench: Bench) -> Iterator[Cell]:
    """Yield the cells of part 5: decode steps of every method, then the prompt."""
    for phase, profile in (("decode", _decode), ("prefill", _prefill)):
        for method in PROFILE_METHODS:
            labels = {"model": bench.scale.model.name, "size": bench.scale.ask_size.label, "method": method}
            yield Cell({**labels, "phase": phase}, partial(profile, bench, method))


def _prefill(bench: Bench, method: str) -> Row:
    engine, layout = _engine_and_layout(bench, bench.scale.model, bench.scale.ask_size)
    return _profile(bench, engine.loaded.model, lambda: engine.open(layout, choice(method)).next_log_probs(), 1)


def _decode(bench: Bench, method: str) -> Row:
    engine, layout = _engine_and_layout(bench, bench.scale.model, bench.scale.ask_size)
    steps = bench.scale.new_tokens
    session = engine.open(layout, choice(method), 16 * steps)

    def run() -> None:
        for _ in range(steps):
            session.advance(int(session.next_log_probs().argmax()))

    return _profile(bench, engine.loaded.model, run, steps)


def _profile(bench: Bench, model: Any, action: Callable[[], object], steps: int) -> Row:
    """Return seconds per step, seconds in kernels, the share of time outside of them, and the slowest kernels.

    Time is measured without the profiler, which slows the host down. On a CPU, operations replace kernels.
    """
    elapsed = seconds(action, bench.device, 2)
    on_gpu = bench.device.type == "cuda"
    waits = count_synchronisations(action, model, bench.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        action()
        if on_gpu:
            torch.cuda.synchronize(bench.device)
    kernels = [(event.key, event.count, _kernel_seconds(event, on_gpu)) for event in profile.key_averages()]
    kernels = sorted((kernel for kernel in kernels if kernel[2] > 0), key=lambda kernel: -kernel[2])
    inside = sum(kernel[2] for kernel in kernels)
    return {
        "step_s": elapsed / steps,
        "kernel_s": inside / steps,
        "outside_kernels": max(0.0, 1.0 - inside / elapsed),
        "kernels_per_step": sum(kernel[1] for kernel in kernels) / steps,
        "synchronisations_per_step": waits / steps,
        "top": [
            {"kernel": name[:160], "calls": count / steps, "step_s": spent / steps, "share": spent / inside}
            for name, count, spent in kernels[:TOP_KERNELS]
        ],
    }


def _kernel_seconds(event: Any, on_gpu: bool) -> float:
    if not on_gpu:
        return float(event.self_cpu_time_total) / 1e6
    kernel = event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    return float(event.self_device_time_total) / 1e6 if kernel else 0.0
