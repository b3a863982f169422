"""What the parts share: one model at a time on the device, cells, records, the time budget, and timed readings.

Records are one JSON file per part, written anew after every row, so that a cut-off run keeps all.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import Model, Scale, engine_of, free_memory, loaded_model
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import RagPosfixError
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.plan.layout import Layout

Row = dict[str, Any]

_PACKAGES = ("torch", "transformers", "numpy", "safetensors", "triton", "flash-attn")


@dataclass(frozen=True)
class Cell:
    """One number of a part, or a few that are measured together: their labels, and what measures them."""

    labels: Mapping[str, Any]
    measure: Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Attributes:
        name: Of its record.
        share: Share of the whole time that it may take, and the time that earlier parts left.
        cells: Its cells, the most important first.
    """

    name: str
    share: float
    cells: Callable[[Bench], Iterator[Cell]]


class Bench:
    """The device and the one model on it; the models of real shapes are loaded in ``dtype``."""

    def __init__(self, scale: Scale, device: torch.device, dtype: torch.dtype) -> None:
        self.scale, self.device, self.dtype = scale, device, dtype
        self._held: dict[str, Engine] = {}

    def engine(self, model: Model) -> Engine:
        """Return the engine of a model, which is made if another one was on the device."""
        if model.name not in self._held:
            self.release()
            self._held[model.name] = engine_of(loaded_model(model, self.device, self.dtype), model.name)
        return self._held[model.name]

    def release(self) -> None:
        """Free the device."""
        self._held.clear()
        free_memory(self.device)


def choice(name: str) -> MitigationChoice:
    """Return a method, with the parameters of its example where it needs some."""
    return MitigationChoice(name, MITIGATIONS.get(name).example)


def run_parts(
    bench: Bench, parts: Sequence[Part], out: Path, minutes: float, say: Callable[[str], None]
) -> dict[str, list[Row]]:
    """Run the parts in order and return the rows of each; each part's record is written after every cell."""
    started, rows_of, share = time.monotonic(), {}, 0.0
    settings = {
        "scale": bench.scale.name, "minutes": minutes, "dtype": str(bench.dtype).removeprefix("torch."),
        "repeats": bench.scale.repeats, "new_tokens": bench.scale.new_tokens,
    }  # fmt: skip
    run = {**environment(bench.device), "settings": settings}
    for number, part in enumerate(parts, start=1):
        share += part.share
        rows: list[Row] = []
        head = {"kind": f"gpu-{part.name}", **run, "complete": False}
        say(f"{number}. {part.name}")
        write(out, f"{number}-{part.name}", head, rows)
        late = False
        for cell in part.cells(bench):
            late = time.monotonic() - started > 60.0 * minutes * share
            if late:
                break
            rows.append({**cell.labels, **_measure_cell(cell, bench.device)})
            say(f"   {_line(rows[-1])}")
            write(out, f"{number}-{part.name}", head, rows)
        write(out, f"{number}-{part.name}", {**head, "complete": not late}, rows)
        rows_of[part.name] = rows
    bench.release()
    return rows_of


def _line(row: Row) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in row.items()
        if not isinstance(value, list | dict)
    )


def _measure_cell(cell: Cell, device: torch.device) -> Row:
    """Return what a cell measures, or why it failed; the run goes on.

    Memory is given back only where it was short: that takes longer than many cells. The cell is then measured again.
    """
    began = time.monotonic()
    row = _attempt(cell)
    if row is None:  # the tensors of the first attempt are free only when its exception is gone
        free_memory(device)
        row = _attempt(cell)
    if row is None:
        free_memory(device)
        row = {"out_of_memory": True}
    return {**row, "seconds": round(time.monotonic() - began, 3)}


def _attempt(cell: Cell) -> Row | None:
    """Return what a cell measures, or why it failed; None where memory is short."""
    try:
        return dict(cell.measure())
    except torch.OutOfMemoryError:
        return None
    except RagPosfixError as error:
        return {"refused": str(error)}
    except Exception as error:  # one broken cell must not cost the others
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, machine, device and git commit of this run."""
    # Not evaluation.record, which needs more packages than computing does.
    facts: dict[str, Any] = {
        "versions": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "git": _commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(device),
        "device_name": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device_name"] = properties.name
        facts["device_memory_bytes"] = properties.total_memory
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
        facts["cuda"] = torch.version.cuda
    return facts


def write(folder: Path, name: str, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a record completely or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{name}.json"
    unfinished.write_text(json.dumps({**head, "rows": list(rows)}, indent=1) + "\n", "utf-8")
    unfinished.replace(folder / f"{name}.json")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    """Return the commit of the source tree, ``-dirty`` appended where files differ; None outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    try:
        answer = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def synchronized_time(device: torch.device) -> float:
    """Return the time when the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of an action, after one that is not counted."""
    action()
    times = []
    for _ in range(repeats):
        started = synchronized_time(device)
        action()
        times.append(synchronized_time(device) - started)
    return statistics.median(times)


def peak_bytes(action: Callable[[], object], device: torch.device) -> int | None:
    """Run an action and return the peak memory of tensors during it, beyond the memory before; None on a CPU."""
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
    started = synchronized_time(device)
    ids = torch.tensor([layout.token_ids], device=device)
    output = model(ids, use_cache=True, logits_to_keep=1)
    token = int(output.logits[0, -1].argmax())
    first = synchronized_time(device)
    for _ in range(new_tokens):
        step = torch.tensor([[token]], device=device)
        output = model(step, past_key_values=output.past_key_values, use_cache=True)
        token = int(output.logits[0, -1].argmax())
    return Reading(first - started, new_tokens / (synchronized_time(device) - first))


def read_method(engine: Engine, layout: Layout, choice: MitigationChoice, new_tokens: int) -> Reading:
    """Time a method through the engine's public calls, with the same greedy loop."""
    device = engine.loaded.device
    started = synchronized_time(device)
    session = engine.open(layout, choice, new_tokens + 1)
    token = int(session.next_log_probs().argmax())
    first = synchronized_time(device)
    for _ in range(new_tokens):
        session.advance(token)
        token = int(session.next_log_probs().argmax())
    return Reading(first - started, new_tokens / (synchronized_time(device) - first))
