"""The laboratory: small decoders trained with every encoding, their record, its table and its figure."""

from __future__ import annotations

import csv
import io
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from rag_posfix.encodings.base import Encoding
from rag_posfix.encodings.decoder import Decoder
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.figures import OTHER_COLORS, finish_axes, new_column, with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent, write_whole
from rag_posfix.laboratory.measuring import Measured, TrainingSettings, digest_of, generator_for, measure
from rag_posfix.laboratory.run_files import FinishedRun, RunFiles, Snapshot
from rag_posfix.laboratory.tasks.base import IGNORED, TRAINED, Task
from rag_posfix.parameters import parameters_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration of one training run; ``seed`` decides start values and training examples."""

    task: Task
    encoding: Encoding
    settings: TrainingSettings
    seed: int


def new_decoder(config: RunConfig, device: torch.device) -> Decoder:
    """Return a decoder at its start values; equal seeds give equal ones."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator_for("start", config.seed).initial_seed())
        return Decoder(config.encoding, config.settings.shape(config.task.vocabulary)).to(device)


def train(
    config: RunConfig,
    device: torch.device,
    files: RunFiles,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> FinishedRun:
    """Train a decoder, or continue where a checkpoint ends, and measure it on all splits.

    A run that was interrupted gives the result of one that was not; on one CPU with one number of threads bit for bit.

    Args:
        files: Checkpoint and result; a finished run is not repeated.
    """
    finished_run = files.finished()
    settings, task = config.settings, config.task
    if finished_run is not None:
        report(settings.steps, settings.steps)
        return finished_run
    decoder = new_decoder(config, device).train()
    optimizer = torch.optim.Adam(decoder.parameters(), lr=settings.learning_rate)
    snapshot = files.resume(decoder, optimizer)
    while snapshot.step < settings.steps and not _is_enough(snapshot, settings, task):
        snapshot = _train_interval(config, decoder, optimizer, snapshot, device, report)
        files.keep(decoder, optimizer, snapshot)
        _log.info("%s, step %d: %.2f", config.encoding.label, snapshot.step, snapshot.history[-1][1].value)
    splits = {split: measure(decoder, task, split, settings.examples, device) for split in task.splits}
    run = FinishedRun(snapshot, splits, sum(parameter.numel() for parameter in decoder.parameters()))
    files.finish(decoder, run)
    report(settings.steps, settings.steps)
    return run


def _train_interval(
    config: RunConfig,
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    snapshot: Snapshot,
    device: torch.device,
    report: Callable[[int, int], None],
) -> Snapshot:
    """Train up to the next evaluation, evaluate, and return where the run is."""
    began, settings = time.perf_counter(), config.settings
    stop = min(settings.steps, snapshot.step + settings.evaluate_every)
    for step in range(snapshot.step, stop):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        _train_step(config, decoder, optimizer, step, device)
        report(step + 1, settings.steps)
    result = measure(decoder, config.task, TRAINED, settings.examples, device)
    seconds = snapshot.seconds + time.perf_counter() - began
    return replace(snapshot, step=stop, seconds=seconds, history=(*snapshot.history, (stop, result)))


def _train_step(
    config: RunConfig, decoder: Decoder, optimizer: torch.optim.Optimizer, step: int, device: torch.device
) -> None:
    """Take one step on examples that the seed and the step alone decide."""
    generator = generator_for("training", config.task.label, config.seed, step)
    batch = config.task.batch(TRAINED, config.settings.batch, generator).to(device)
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type="cuda"):
        if config.settings.dropout:
            torch.manual_seed(generator.initial_seed())
        logits, _ = decoder(batch.ids)
    loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    optimizer.step()


def _is_enough(snapshot: Snapshot, settings: TrainingSettings, task: Task) -> bool:
    """Return whether training may stop early: no error, or no better perplexity, for ``patience`` evaluations."""
    values = [result.value for _, result in snapshot.history]
    if not settings.patience or len(values) <= settings.patience:
        return bool(settings.patience) and task.metric == "error" and values == [0.0] * settings.patience
    last = values[-settings.patience :]
    if task.metric == "error":
        return not any(last)
    return min(last) >= min(values[: -settings.patience])


def draw_laboratory(head: Mapping[str, Any]) -> Figure:
    """Return the figure of a record of ``lab run``, which shows every seed.

    Tasks that measure by place have curves over the places, with axes for each split; perplexity has curves over the
    splits; other tasks have a mark per seed by split, and a line at their mean.
    """
    summary = head["summary"]
    splits = summary["splits"]
    results = {re.sub("[:_=]", " ", label): result for label, result in summary["encodings"].items()}
    if summary["by_place"]:
        figure, column = new_column(len(splits), 3.2)
        for axes, (split, text) in zip(column, splits.items(), strict=True):
            for number, (label, result) in enumerate(results.items()):
                _lines(axes, label, number, result["splits"][split]["by_place"])
            axes.set_ylim(bottom=0)
            x = "place of the pair that is asked for, from 0"
            finish_axes(axes, f"{split}: {text}, {_seeds(head)}", x, "error in %", columns=3)
        return figure
    figure, (axes,) = new_column(1, 3.8)
    if summary["metric"] == "perplexity":
        for number, (label, result) in enumerate(results.items()):
            _lines(axes, label, number, list(result["splits"].values()))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        measure = "perplexity"
    else:
        _marks(axes, results, splits)
        measure = "error in %"
    names = [f"{name}:\n{fill(text, 46 // len(splits))}" for name, text in splits.items()]
    axes.set_xticks(range(len(splits)), names, fontsize=9)
    below = 20 + 11 * max(name.count("\n") + 1 for name in names)
    finish_axes(axes, f"{_words(summary)}, {_seeds(head)}", "", measure, columns=3, below=below)
    return figure


def _words(summary: Mapping[str, Any]) -> str:
    """Return the task in words, without its parameters, which the names of the splits tell."""
    return str(summary["task"]).partition(":")[0].replace("_", " ")


def _seeds(head: Mapping[str, Any]) -> str:
    seeds = head["summary"]["seeds"]
    return f"{'one seed' if seeds == 1 else f'each of {seeds} seeds'}, n = {head['settings']['examples']:,}"


def _lines(axes: Any, label: str, number: int, spreads: list[Mapping[str, Any]]) -> None:
    """Draw a line per seed."""
    for seed, values in enumerate(zip(*(spread["values"] for spread in spreads), strict=True)):
        style = {"marker": "o", "markersize": 3, "linewidth": 1, "color": _colour(number)}
        axes.plot(range(len(values)), values, label=label if seed == 0 else None, **style)


def _marks(axes: Any, results: Mapping[str, Any], splits: Mapping[str, str]) -> None:
    """Draw a mark per seed for each split and encoding, and a line at their mean."""
    width = 0.8 / len(results)
    for number, (label, result) in enumerate(results.items()):
        for index, split in enumerate(splits):
            spread = result["splits"][split]
            centre = index + (number - (len(results) - 1) / 2) * width
            at = [
                centre + width * 0.18 * (seed - (len(spread["values"]) - 1) / 2)
                for seed in range(len(spread["values"]))
            ]
            name = label if index == 0 else None
            axes.plot(at, spread["values"], "o", markersize=4, color=_colour(number), label=name, clip_on=False)
            axes.hlines(
                spread["mean"], centre - width / 2.4, centre + width / 2.4, color=_colour(number), linewidth=1.5
            )
    axes.set_ylim(bottom=0)


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
    write_whole(path, [_table(record.rows)])
    return replace(record, files={**record.files, "csv": path})


def _table(rows: Sequence[Mapping[str, Any]]) -> bytes:
    written = io.StringIO()
    names = [name for name in rows[0] if name != "by_place"]
    writer = csv.DictWriter(written, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue().encode()
