"""The experiment of the laboratory: every encoding, every seed, one record."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rag_posfix.encodings.base import Encoding
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.figures import with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent, write_whole
from rag_posfix.laboratory.measuring import Measured
from rag_posfix.laboratory.pictures import draw_laboratory
from rag_posfix.laboratory.run_files import FinishedRun, RunFiles
from rag_posfix.laboratory.settings import TrainingSettings, digest_of
from rag_posfix.laboratory.tasks.base import TRAINED, Task
from rag_posfix.laboratory.training import Trainee, new_decoder, train
from rag_posfix.parameters import parameters_of

FORMAT = 1
"""Part of the name of a run's folder; changes when the meaning of checkpoints or of the training does."""


def run_laboratory(
    task: Task,
    encodings: Sequence[Encoding],
    *,
    seeds: int = 3,
    settings: TrainingSettings | None = None,
    device: str = "cpu",
    out: Path | None = None,
    progress: Progress = silent,
) -> ExperimentRecord:
    """Train a small decoder per encoding and seed, and measure each in and out of the training distribution.

    Args:
        seeds: Number of seeds; seed n has the same start values and examples for every encoding.
        device: "cpu", "cuda", ...; "auto" is a GPU if there is one.
        out: Folder for checkpoints, decoders, record, table and picture; None writes nothing. Runs that are finished
            there are not repeated, and others continue at their checkpoint.

    Returns:
        The record: one row per encoding, seed and split, and one per evaluation during training.
    """
    chosen = settings or TrainingSettings()
    found_device = _device(device)
    runs = [Trainee(task, encoding, chosen, seed) for encoding in encodings for seed in range(seeds)]
    _check(task, encodings, seeds, runs, found_device)
    finished: list[tuple[Trainee, FinishedRun]] = []
    for number, one in enumerate(runs):
        with progress(f"{one.encoding.label}, seed {one.seed} ({number + 1} of {len(runs)})") as report:
            finished.append((one, train(one, found_device, RunFiles(_folder(out, one)), report)))
    head = {
        "kind": "lab",
        **environment(),
        "device": str(found_device),
        "threads": torch.get_num_threads(),
        "task": {"name": task.name, "parameters": task.parameters},
        "encodings": {one.label: {"name": one.name, "parameters": one.parameters} for one in encodings},
        "settings": {name: getattr(chosen, name) for name in parameters_of(TrainingSettings)} | {"seeds": seeds},
        "summary": _summary(task, encodings, seeds, finished),
    }
    rows = [row for one, run in finished for row in _rows(one, run)]
    return with_figure(_with_table(ExperimentRecord(head, rows).write(out)), draw_laboratory)


def _check(
    task: Task, encodings: Sequence[Encoding], seeds: int, runs: Sequence[Trainee], device: torch.device
) -> None:
    """Check the choice, and that every encoding can read every split, before anything is trained."""
    labels = [one.label for one in encodings]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice or not labels or seeds < 1:
        what = f"{twice[0]!r} is named twice" if twice else f"{len(labels)} encodings and {seeds} seeds"
        raise ConfigError(f"nothing to compare: {what}; name each encoding once, and at least one with one seed")
    for one in runs[::seeds]:
        decoder = new_decoder(one, device).eval()
        for split in task.splits:
            with torch.inference_mode():
                decoder(task.batch(split, 1, torch.Generator().manual_seed(0)).to(device).ids)


def _device(name: str) -> torch.device:
    """Return a device by name."""
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        message = str(error).partition("\n")[0]
        raise ConfigError(f"device {name!r} cannot be used: {message}; give auto, cpu or cuda") from error
    return device


def _folder(out: Path | None, one: Trainee) -> Path | None:
    """Return the folder of a run; other sizes or settings have another one."""
    if out is None:
        return None
    settings = {name: getattr(one.settings, name) for name in parameters_of(TrainingSettings)}
    digest = digest_of(
        FORMAT, one.task.name, one.task.parameters, one.encoding.name, one.encoding.parameters, settings
    )
    readable = re.sub(r"[^\w.=-]+", "-", one.encoding.label)[:60]
    return out / one.task.name / f"{readable}-{digest}" / f"seed-{one.seed}"


def _rows(one: Trainee, run: FinishedRun) -> Iterator[dict[str, Any]]:
    """Yield a row per evaluation during training, then one per split."""
    history = [(step, TRAINED, False, measured) for step, measured in run.snapshot.history]
    final = [(run.snapshot.step, split, True, measured) for split, measured in run.splits.items()]
    for step, split, is_final, measured in [*history, *final]:
        yield {
            "encoding": one.encoding.label,
            "seed": one.seed,
            "step": step,
            "split": split,
            "final": is_final,
            "value": measured.value,
            "token_error": measured.token_error,
            "loss": measured.loss,
            "by_place": list(measured.by_place),
        }


def _summary(
    task: Task, encodings: Sequence[Encoding], seeds: int, finished: Sequence[tuple[Trainee, FinishedRun]]
) -> dict[str, Any]:
    found = {}
    for encoding in encodings:
        runs = [run for one, run in finished if one.encoding == encoding]
        found[encoding.label] = {
            "parameters": runs[0].parameters,
            "steps": [run.snapshot.step for run in runs],
            "seconds": [round(run.snapshot.seconds, 1) for run in runs],
            "splits": {split: _spread_of([run.splits[split] for run in runs]) for split in task.splits},
        }
    return {
        "task": task.label,
        "metric": task.metric,
        "by_place": task.measured_by_place,
        "splits": dict(task.splits),
        "seeds": seeds,
        "encodings": found,
    }


def _spread_of(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return mean, lowest and highest value over seeds, and the same of each place."""
    places = zip(*(one.by_place for one in measured), strict=True)
    spread: dict[str, Any] = _spread([one.value for one in measured])
    token_error = _spread([one.token_error for one in measured])
    return {**spread, "token_error": token_error["mean"], "by_place": [_spread(values) for values in places]}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"mean": sum(values) / len(values), "low": min(values), "high": max(values), "values": list(values)}


def _with_table(record: ExperimentRecord) -> ExperimentRecord:
    """Return the record with its rows as CSV beside it; as it is if it has no files."""
    if "record" not in record.files:
        return record
    path = record.files["record"].with_suffix(".csv")
    try:
        write_whole(path, [_table(record.rows)])
    except OSError as error:
        raise EvaluationError(f"cannot write {path}: {error.strerror}; choose another --out") from error
    return replace(record, files={**record.files, "csv": path})


def _table(rows: Sequence[Mapping[str, Any]]) -> bytes:
    written = io.StringIO()
    names = [name for name in rows[0] if name != "by_place"]
    writer = csv.DictWriter(written, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue().encode()
