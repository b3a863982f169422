"""The laboratory: small decoders trained with every encoding, their record, its table and its figure."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rag_posfix.encodings.base import Encoding
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.figures import OTHER_COLORS, new_axes, new_row, with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent, write_whole
from rag_posfix.laboratory.measuring import Measured, TrainingSettings, digest_of
from rag_posfix.laboratory.run_files import FinishedRun, RunFiles
from rag_posfix.laboratory.tasks.base import TRAINED, Task
from rag_posfix.laboratory.training import RunConfig, new_decoder, train
from rag_posfix.parameters import parameters_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_laboratory(head: Mapping[str, Any]) -> Figure:
    """Return the figure of a record of ``lab run``.

    Tasks that measure by place have curves over the places, with axes for each split; perplexity has a curve over the
    splits; other tasks have bars by split. Bands and whiskers go from the lowest to the highest seed.
    """
    summary = head["summary"]
    if summary["by_place"]:
        return _draw_by_place(summary)
    figure, axes = new_axes((7.2, 3.8))
    results = summary["encodings"]
    if summary["metric"] == "perplexity":
        for number, (label, result) in enumerate(results.items()):
            _band(axes, label, number, list(result["splits"].values()))
        axes.set_xticks(range(len(summary["splits"])), list(summary["splits"].values()))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        _bars(axes, results, summary["splits"])
    axes.set_ylabel("error in %" if summary["metric"] == "error" else "perplexity")
    axes.set_title(_title(summary), fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _draw_by_place(summary: Mapping[str, Any]) -> Figure:
    """Draw the error by place, with axes for each split."""
    splits = summary["splits"]
    figure, row = new_row(len(splits), (9.6, 4.2), share_y=True)
    for axes, (split, text) in zip(row, splits.items(), strict=True):
        for number, (label, result) in enumerate(summary["encodings"].items()):
            _band(axes, label, number, result["splits"][split]["by_place"])
        axes.set_title(f"{split}: {text}", fontsize=10, loc="left")
        axes.set_xlabel("place of the pair that is asked for, from 0")
    row[0].set_ylabel("error in %")
    row[0].set_ylim(bottom=0)
    figure.suptitle(_title(summary), fontsize=10, x=0.02, ha="left")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    return figure


def _title(summary: Mapping[str, Any]) -> str:
    seeds = "one seed" if summary["seeds"] == 1 else f"{summary['seeds']} seeds, lowest to highest"
    return f"{summary['task']}: {seeds}"


def _band(axes: Any, label: str, number: int, spreads: list[Mapping[str, float]]) -> None:
    """Draw means as a line, and the spread over seeds as a band."""
    positions, colour = range(len(spreads)), _colour(number)
    axes.plot(positions, [spread["mean"] for spread in spreads], marker="o", markersize=4, color=colour, label=label)
    low, high = ([spread[key] for spread in spreads] for key in ("low", "high"))
    axes.fill_between(positions, low, high, color=colour, alpha=0.18, linewidth=0)


def _bars(axes: Any, results: Mapping[str, Any], splits: Mapping[str, str]) -> None:
    """Draw a group of bars for each split, one bar per encoding."""
    width = 0.8 / len(results)
    for number, (label, result) in enumerate(results.items()):
        spreads = [result["splits"][split] for split in splits]
        centres = [index + (number - (len(results) - 1) / 2) * width for index in range(len(splits))]
        means = [spread["mean"] for spread in spreads]
        whiskers = [
            [mean - spread["low"] for mean, spread in zip(means, spreads, strict=True)],
            [spread["high"] - mean for mean, spread in zip(means, spreads, strict=True)],
        ]
        axes.bar(centres, means, width, yerr=whiskers, color=_colour(number), label=label, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(splits)), [f"{name}\n{text}" for name, text in splits.items()], fontsize=8)


def _colour(number: int) -> str:
    return OTHER_COLORS[number % len(OTHER_COLORS)]


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
        out: Folder for checkpoints, decoders, record, table and figure; None writes nothing. Runs that are finished
            there are not repeated, and others continue at their checkpoint.

    Returns:
        The record: one row per encoding, seed and split, and one per evaluation during training.
    """
    chosen = settings or TrainingSettings()
    torch_device = _device(device)
    runs = [RunConfig(task, encoding, chosen, seed) for encoding in encodings for seed in range(seeds)]
    _check(task, encodings, seeds, runs, torch_device)
    finished: list[tuple[RunConfig, FinishedRun]] = []
    for number, config in enumerate(runs):
        with progress(f"{config.encoding.label}, seed {config.seed} ({number + 1} of {len(runs)})") as report:
            finished.append((config, train(config, torch_device, RunFiles(_folder(out, config)), report)))
    head = {
        "kind": "lab",
        **environment(),
        "device": str(torch_device),
        "threads": torch.get_num_threads(),
        "task": {"name": task.name, "parameters": task.parameters},
        "encodings": {
            encoding.label: {"name": encoding.name, "parameters": encoding.parameters} for encoding in encodings
        },
        "settings": {name: getattr(chosen, name) for name in parameters_of(TrainingSettings)} | {"seeds": seeds},
        "summary": _summary(task, encodings, seeds, finished),
    }
    rows = [row for config, run in finished for row in _rows(config, run)]
    return with_figure(_with_table(ExperimentRecord(head, rows).write(out)), draw_laboratory)


def _check(
    task: Task, encodings: Sequence[Encoding], seeds: int, runs: Sequence[RunConfig], device: torch.device
) -> None:
    """Check the choice, and that every encoding can read every split, before anything is trained."""
    labels = [encoding.label for encoding in encodings]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice or not labels or seeds < 1:
        problem = f"{twice[0]!r} is named twice" if twice else f"{len(labels)} encodings and {seeds} seeds"
        raise ConfigError(f"nothing to compare: {problem}; name each encoding once, and at least one with one seed")
    for config in runs[::seeds]:
        decoder = new_decoder(config, device).eval()
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


def _folder(out: Path | None, config: RunConfig) -> Path | None:
    """Return the folder of a run; other sizes or settings have another folder."""
    if out is None:
        return None
    settings = {name: getattr(config.settings, name) for name in parameters_of(TrainingSettings)}
    digest = digest_of(
        FORMAT, config.task.name, config.task.parameters, config.encoding.name, config.encoding.parameters, settings
    )
    readable = re.sub(r"[^\w.=-]+", "-", config.encoding.label)[:60]
    return out / config.task.name / f"{readable}-{digest}" / f"seed-{config.seed}"


def _rows(config: RunConfig, run: FinishedRun) -> Iterator[dict[str, Any]]:
    """Yield a row per evaluation during training, then one per split."""
    history = [(step, TRAINED, False, measured) for step, measured in run.snapshot.history]
    final = [(run.snapshot.step, split, True, measured) for split, measured in run.splits.items()]
    for step, split, is_final, measured in [*history, *final]:
        yield {
            "encoding": config.encoding.label,
            "seed": config.seed,
            "step": step,
            "split": split,
            "final": is_final,
            "value": measured.value,
            "token_error": measured.token_error,
            "loss": measured.loss,
            "by_place": list(measured.by_place),
        }


def _summary(
    task: Task, encodings: Sequence[Encoding], seeds: int, finished: Sequence[tuple[RunConfig, FinishedRun]]
) -> dict[str, Any]:
    summaries = {}
    for encoding in encodings:
        runs = [run for config, run in finished if config.encoding == encoding]
        summaries[encoding.label] = {
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
        "encodings": summaries,
    }


def _spread_of(measured: Sequence[Measured]) -> dict[str, Any]:
    """Return mean, lowest and highest value over seeds, and the same of each place."""
    values_by_place = zip(*(result.by_place for result in measured), strict=True)
    spread: dict[str, Any] = _spread([result.value for result in measured])
    token_error = _spread([result.token_error for result in measured])
    return {**spread, "token_error": token_error["mean"], "by_place": [_spread(values) for values in values_by_place]}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"mean": sum(values) / len(values), "low": min(values), "high": max(values), "values": list(values)}


def _with_table(record: ExperimentRecord) -> ExperimentRecord:
    """Return the record with its rows as CSV next to it; unchanged if it has no files."""
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
