"""Part 3: passages from device memory, host memory, pinned host memory and disk, against what the bus carries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Cell, choice
from benchmarks.gpu.first_token import STORE_BYTES
from benchmarks.gpu.models import random_layout
from benchmarks.gpu.timing import seconds
from rag_posfix.caching.kv.disk import DiskPassages
from rag_posfix.caching.kv.entry import PassageKV
from rag_posfix.caching.kv.memory import MemoryPassages
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.prefill.per_passage import encode_passages
from rag_posfix.generation.prefill.rows import resolve
from rag_posfix.generation.prefill.segments import KVLookup
from rag_posfix.plan.layout import Layout

METHOD = "parallel_encoding"
REPEATS = 3


class PinnedPassages(MemoryPassages):
    """The memory tier with its entries in pinned host memory, from which the device copies by itself."""

    def put_many(self, entries: Mapping[str, PassageKV]) -> None:
        """Keep copies of ``entries`` in pinned memory."""
        super().put_many({key: replace(entry, states=_pinned(entry.states)) for key, entry in entries.items()})


def cells(bench: Bench) -> Iterator[Cell]:
    """Yield the cells: what the bus carries, then the store from each place."""
    for name in ("pinned", "pageable"):
        for direction in ("to device", "from device"):
            labels = {"what": "copy", "memory": name, "direction": direction}
            yield Cell(labels, partial(_bus, bench, name == "pinned", direction == "to device"))
    yield Cell({"what": "copy", "memory": "device", "direction": "on device"}, partial(_on_device, bench))
    for place in ("device", "pinned host", "host", "disk"):
        yield Cell({"what": "store", "place": place, "method": METHOD}, partial(_store, bench, place))


def _bus(bench: Bench, pinned: bool, to_device: bool) -> dict[str, Any]:
    """Time copies of one large block between host and device."""
    host = torch.empty(bench.scale.copied_bytes, dtype=torch.uint8)
    host = _pinned(host) if pinned else host
    device = torch.empty_like(host, device=bench.device)
    source, target = (host, device) if to_device else (device, host)
    return _rate(bench, source.nbytes, lambda: target.copy_(source, non_blocking=pinned))


def _on_device(bench: Bench) -> dict[str, Any]:
    """Time copies of one large block within the device."""
    source = torch.empty(bench.scale.copied_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return _rate(bench, source.nbytes, lambda: target.copy_(source))


def _rate(bench: Bench, n_bytes: int, action: Any) -> dict[str, Any]:
    taken = seconds(action, bench.device, REPEATS)
    return {"bytes": n_bytes, "copy_s": taken, "bytes_per_s": n_bytes / taken}


def _store(bench: Bench, place: str) -> dict[str, Any]:
    """Time how long a store takes to bring prefix and passages to the device, and the first token after it."""
    engine = bench.engine(bench.scale.model)
    layout = random_layout(bench.scale.model.config["vocab_size"], bench.scale.asked.lengths)
    with TemporaryDirectory(prefix="rag-posfix-gpu-") as folder:
        store = _made(bench, place, Path(folder))
        try:
            kept = engine.with_passages(store)
            kept.open(layout, choice(METHOD))
            store.flush(300.0)
            session = kept.open(layout, choice(METHOD))
            find = _finder(kept, store, layout)
            n_bytes = sum(states.nbytes for states in find().values())
            taken = seconds(find, bench.device, REPEATS)
            first = seconds(
                lambda: int(kept.open(layout, choice(METHOD)).next_log_probs().argmax()), bench.device, REPEATS
            )
            cached = session.cached_tokens
        finally:
            store.close()
    return {
        "cached_tokens": cached, "bytes": n_bytes, "find_s": taken, "bytes_per_s": n_bytes / taken,
        "warm_first_s": first,
    }  # fmt: skip


def _made(bench: Bench, place: str, folder: Path) -> PassageStore:
    """Return a store with one tier."""
    if place == "device":
        return PassageStore([MemoryPassages(STORE_BYTES)], device=bench.device)
    if place == "host":
        return PassageStore([MemoryPassages(STORE_BYTES)], device="cpu")
    if place == "pinned host":
        return PassageStore([PinnedPassages(STORE_BYTES)], device="cpu")
    disk = DiskPassages(folder, max_bytes=STORE_BYTES)
    return PassageStore([disk], device=bench.device, queue_bytes=STORE_BYTES)


def _finder(engine: Engine, store: PassageStore, layout: Layout) -> Any:
    """Return what finds prefix and passages in a store and has them on the device."""
    loaded, chosen = engine.loaded, choice(METHOD)
    rows = [resolve(row, layout, loaded.device) for row in engine.plan(layout, chosen, 1).rows]
    lookup = KVLookup(store, engine.fingerprint, engine.describe(chosen).fingerprint)

    @torch.inference_mode()
    def find() -> dict[Any, torch.Tensor]:
        return encode_passages(loaded, layout, rows, lookup)[0]

    return find


def _pinned(states: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory; in ordinary memory where there is no GPU."""
    host = states.cpu()
    return host.pin_memory() if torch.cuda.is_available() else host
