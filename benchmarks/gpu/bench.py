"""What the parts share: one model at a time on the device, cells that are measured one by one, and the time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import Model, Scale, engine_of, free_memory, loaded_model
from benchmarks.gpu.record import environment, write
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import RagPosfixError
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import MITIGATIONS

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One number of a part, or a few that are measured together.

    Attributes:
        labels: What is measured.
        measure: Measures it and returns what was found.
    """

    labels: Mapping[str, Any]
    measure: Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Attributes:
        name: Of its record.
        share: How much of the whole time it may take; what earlier parts left is its own too.
        cells: Its cells, the most important first.
    """

    name: str
    share: float
    cells: Callable[[Bench], Iterator[Cell]]


class Bench:
    """The device, and the one model that is on it.

    Args:
        scale: How much is measured.
        dtype: Of the models of real shapes.
    """

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
    started, found, share = time.monotonic(), {}, 0.0
    about = {**environment(bench.device), "settings": _settings(bench, minutes)}
    for number, part in enumerate(parts, start=1):
        share += part.share
        rows: list[Row] = []
        head = {"kind": f"gpu-{part.name}", **about, "complete": False}
        say(f"{number}. {part.name}")
        write(out, f"{number}-{part.name}", head, rows)
        late = False
        for cell in part.cells(bench):
            late = time.monotonic() - started > 60.0 * minutes * share
            if late:
                break
            rows.append({**cell.labels, **_measured(cell, bench.device)})
            say(f"   {_line(rows[-1])}")
            write(out, f"{number}-{part.name}", head, rows)
        write(out, f"{number}-{part.name}", {**head, "complete": not late}, rows)
        found[part.name] = rows
    bench.release()
    return found


def _measured(cell: Cell, device: torch.device) -> Row:
    """Return what a cell finds, or why it found nothing; the run goes on.

    Memory is given back only where it was short: that takes longer than many cells. The cell is then measured again.
    """
    began = time.monotonic()
    found = _attempt(cell)
    if found is None:  # what the first attempt held is free only when its exception is gone
        free_memory(device)
        found = _attempt(cell)
    if found is None:
        free_memory(device)
        found = {"out_of_memory": True}
    return {**found, "seconds": round(time.monotonic() - began, 3)}


def _attempt(cell: Cell) -> Row | None:
    """Return what a cell finds, or why it found nothing; None where memory is short."""
    try:
        return dict(cell.measure())
    except torch.OutOfMemoryError:
        return None
    except RagPosfixError as error:
        return {"refused": str(error)}
    except Exception as error:  # one broken cell must not cost the others
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def _settings(bench: Bench, minutes: float) -> Row:
    scale = bench.scale
    return {
        "scale": scale.name,
        "minutes": minutes,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "repeats": scale.repeats,
        "new_tokens": scale.new_tokens,
    }


def _line(row: Row) -> str:
    shown = {name: value for name, value in row.items() if not isinstance(value, list | dict)}
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in shown.items()
    )
