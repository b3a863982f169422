"""The laboratory: small decoders trained with every encoding, their record, its table and its figure.

Settings of a training in the laboratory, and the errors of a decoder on a task.

The files of one training run: a checkpoint while it runs, then the decoder and what was measured.

A checkpoint is one safetensors file that is replaced whole: weights, Adam's states, and as metadata the step and the
measures so far.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rag_posfix.checkpoints import flattened, separated
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.figures import OTHER_COLORS, finish_axes, new_column, with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent, write_whole
from rag_posfix.lab.encodings.base import DecoderShape, Encoding
from rag_posfix.lab.encodings.decoder import Decoder
from rag_posfix.lab.tasks.base import IGNORED, TRAINED, Batch, Task
from rag_posfix.parameters import Integer, Number, check_parameters, parameters_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Sizes and training of a decoder.

    Attributes:
        steps: Most training steps.
        batch: Examples per step.
        learning_rate: Of Adam, after ``warmup`` steps; it then falls along half a cosine to a tenth.
        warmup: Steps in which the rate rises from 0.
        evaluate_every: Steps between two evaluations; a checkpoint follows each.
        examples: Examples of an evaluation, per split.
        patience: Evaluations after which training stops early: that many in a row without error, or, for perplexity,
            without a new best; 0 never stops early. Evaluations before DroPE drops its rotation do not count.
        layers: Layers of the decoder.
        heads: Attention heads of a layer.
        width: Channels of a hidden state.
        inner: Channels of the feed-forward part; 0 is four times ``width``.
        norm: "pre" or "post".
        dropout: Share of channels that are set to 0 in training.

    Raises:
        ConfigError: a value is out of range.
    """

    steps: Annotated[int, Integer(1)] = 2000
    batch: Annotated[int, Integer(1)] = 32
    learning_rate: Annotated[float, Number(0, 1, exclusive_min=True)] = 1e-3
    warmup: Annotated[int, Integer(0)] = 100
    evaluate_every: Annotated[int, Integer(1)] = 200
    examples: Annotated[int, Integer(1)] = 512
    patience: Annotated[int, Integer(0)] = 3
    layers: Annotated[int, Integer(1)] = 2
    heads: Annotated[int, Integer(1)] = 4
    width: Annotated[int, Integer(2)] = 64
    inner: Annotated[int, Integer(0)] = 0
    norm: Literal["pre", "post"] = "pre"
    dropout: Annotated[float, Number(0, 0.9)] = 0.0

    def __post_init__(self) -> None:
        check_parameters(self, "lab")

    def shape(self, vocabulary: int) -> DecoderShape:
        """Return the shape of the decoder for a task."""
        return DecoderShape(
            vocabulary, self.layers, self.heads, self.width, self.inner or 4 * self.width, self.norm, self.dropout
        )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def digest_of(*values: Any) -> str:
    """Return a digest of values that JSON can hold."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def generator_for(*values: Any) -> torch.Generator:
    """Return a generator that these values seed: nothing that was drawn before matters, so a run can be resumed."""
    return torch.Generator().manual_seed(int(digest_of(*values), 16) >> 1)


TOKENS_AT_ONCE = 1 << 13
"""Tokens of a forward pass of an evaluation, so that O(T^2) encodings stay within memory at longer contexts."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measure of one split.

    Attributes:
        value: Error in percent, or perplexity, as the task's ``metric`` says.
        token_error: Share of scored tokens that are wrong, in percent.
        loss: Mean cross-entropy of the scored tokens, in nats.
        by_place: Error of the examples of each place, in tasks that measure by place.
    """

    value: float
    token_error: float
    loss: float
    by_place: tuple[float, ...] = ()

    @classmethod
    def of(cls, payload: dict[str, Any]) -> Measured:
        """Return the measure that ``dataclasses.asdict`` made a mapping of."""
        return cls(payload["value"], payload["token_error"], payload["loss"], tuple(payload["by_place"]))


@torch.inference_mode()
def measure(decoder: Decoder, task: Task, split: str, examples: int, device: torch.device) -> Measured:
    """Return the measure of a decoder on examples that are the same for every decoder.

    Args:
        decoder: The decoder; it is set to evaluate and back.
    """
    training = decoder.training
    decoder.eval()
    losses, wrong, tokens, positions = [], [], [], []
    for batch in _batches(task, split, examples):
        counts = _measure_batch(decoder, batch.to(device))
        losses.append(counts[0])
        wrong.append(counts[1])
        tokens.append(counts[2])
        if batch.places is not None:
            positions.append(batch.places)
    decoder.train(training)
    n_tokens, n_wrong, n_scored = torch.cat(losses).double(), torch.cat(wrong), torch.cat(tokens)
    loss = n_tokens.sum() / n_scored.sum()
    failed = (n_wrong > 0).double()
    # torch's exp of a loss of a decoder that diverged is infinite; that of math is an error
    value = float(loss.exp()) if task.metric == "perplexity" else 100 * float(failed.mean())
    by_place = _by_place(failed, torch.cat(positions)) if task.measured_by_place else ()
    return Measured(value, 100 * float(n_wrong.sum() / n_scored.sum()), float(loss), by_place)


def _batches(task: Task, split: str, examples: int) -> Iterator[Batch]:
    """Yield the examples of an evaluation, as many at a time as ``TOKENS_AT_ONCE`` holds."""
    generator = generator_for("evaluation", task.label, split)
    everything = task.batch(split, examples, generator)
    size = max(1, TOKENS_AT_ONCE // everything.ids.shape[1])
    for first in range(0, examples, size):
        rows = slice(first, first + size)
        positions = None if everything.places is None else everything.places[rows]
        yield Batch(everything.ids[rows], everything.targets[rows], everything.scored[rows], positions)


def _measure_batch(decoder: Decoder, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the wrong tokens and the scored tokens of each example, (B,) each, on the CPU."""
    logits, _ = decoder(batch.ids)
    targets = torch.where(batch.scored, batch.targets, IGNORED)
    losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    wrong = (logits.argmax(dim=-1) != targets) & batch.scored
    counts = losses.view(targets.shape).sum(dim=1), wrong.sum(dim=1), batch.scored.sum(dim=1)
    return counts[0].cpu(), counts[1].cpu(), counts[2].cpu()


def _by_place(failed: Tensor, positions: Tensor) -> tuple[float, ...]:
    """Return the error of the examples of each place in percent; of a place without examples the mean of all."""
    mean = float(failed.mean())
    groups = [failed[positions == position] for position in range(int(positions.max()) + 1)]
    return tuple(100 * (float(group.mean()) if group.numel() else mean) for group in groups)


_log = logging.getLogger(__name__)

CHECKPOINT, RESULT = "checkpoint.safetensors", "run.json"


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A point of a training run.

    Attributes:
        step: Steps done.
        seconds: Time that they took, evaluations included.
        history: (step, measure in distribution) of each evaluation.
    """

    step: int = 0
    seconds: float = 0.0
    history: tuple[tuple[int, Measured], ...] = ()

    def text(self) -> str:
        """Return the snapshot as JSON."""
        return json.dumps(
            {
                "step": self.step,
                "seconds": self.seconds,
                "history": [[step, asdict(result)] for step, result in self.history],
            }
        )

    @classmethod
    def read(cls, text: str) -> Snapshot:
        """Return the snapshot that ``text`` wrote."""
        payload: dict[str, Any] = json.loads(text)
        history = tuple((step, Measured.of(result)) for step, result in payload["history"])
        return cls(payload["step"], payload["seconds"], history)


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRun:
    """What came out of a training run.

    Attributes:
        snapshot: Its end.
        splits: The measure of each split.
        parameters: Number of trained numbers.
    """

    snapshot: Snapshot
    splits: dict[str, Measured]
    parameters: int


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The folder of one training run; None keeps nothing.

    Attributes:
        folder: The folder.
    """

    folder: Path | None

    def finished(self) -> FinishedRun | None:
        """Return the result of a run that came to its end earlier, or None."""
        if self.folder is None:
            return None
        try:
            payload = json.loads((self.folder / RESULT).read_text("utf-8"))
            splits = {name: Measured.of(result) for name, result in payload["splits"].items()}
            return FinishedRun(Snapshot.read(json.dumps(payload["snapshot"])), splits, payload["parameters"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be used (%s); the run is repeated", self.folder / RESULT, error)
            return None

    def finish(self, decoder: Decoder, run: FinishedRun) -> None:
        """Write the decoder and the result, and remove the checkpoint."""
        if self.folder is None:
            return
        decoder.save(self.folder)
        payload = {
            "parameters": run.parameters,
            "splits": {name: asdict(result) for name, result in run.splits.items()},
            "snapshot": json.loads(run.snapshot.text()),
        }
        self._write(RESULT, json.dumps(payload, indent=2).encode() + b"\n")
        (self.folder / CHECKPOINT).unlink(missing_ok=True)

    def keep(self, decoder: Decoder, optimizer: torch.optim.Optimizer, snapshot: Snapshot) -> None:
        """Write a checkpoint."""
        if self.folder is None:
            return
        from safetensors.torch import save

        content = save(flattened(decoder.state_dict(), optimizer), {"run": snapshot.text()})
        self._write(CHECKPOINT, content)

    def resume(self, decoder: Decoder, optimizer: torch.optim.Optimizer) -> Snapshot:
        """Put weights and Adam's states of the checkpoint in place and return its snapshot; without one, the start.

        A checkpoint that cannot be read counts as none, with a warning.
        """
        if self.folder is None or not (self.folder / CHECKPOINT).exists():
            return Snapshot()
        from safetensors import SafetensorError, safe_open

        path = self.folder / CHECKPOINT
        try:
            with safe_open(path, framework="pt") as file:
                snapshot = Snapshot.read((file.metadata() or {})["run"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            _put(tensors, decoder, optimizer)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            _log.warning("%s cannot be used (%s); the run starts again", path, error)
            return Snapshot()
        return snapshot

    def _write(self, name: str, content: bytes) -> None:
        if self.folder is not None:
            write_whole(self.folder / name, [content])


def _put(tensors: dict[str, Tensor], decoder: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Load the tensors of a checkpoint."""
    weights, states = separated(tensors)
    decoder.load_state_dict(weights)
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration of one training run; ``seed`` decides start values and training examples."""

    task: Task
    encoding: Encoding
    settings: TrainingSettings
    seed: int

    @property
    def final_step(self) -> int:
        """The first step, from 0, with the positions of the trained decoder; the last step has them at least."""
        return min(self.settings.steps - 1, round(self.settings.steps * self.encoding.final_from))

    def rate(self, step: int) -> float:
        """Return the learning rate of a step; it rises and falls again from ``final_step`` on."""
        first = self.final_step
        if step < first:
            return replace(self.settings, steps=first).rate(step)
        steps = self.settings.steps - first
        warmup = self.settings.warmup * steps // self.settings.steps
        return replace(self.settings, steps=steps, warmup=warmup).rate(step - first)


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
    while snapshot.step < settings.steps and not _is_enough(snapshot, config):
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
            group["lr"] = config.rate(step)
        _train_step(config, decoder, optimizer, step, device)
        report(step + 1, settings.steps)
    result = measure(decoder, config.task, TRAINED, settings.examples, device)
    seconds = snapshot.seconds + time.perf_counter() - began
    return replace(snapshot, step=stop, seconds=seconds, history=(*snapshot.history, (stop, result)))


def _train_step(
    config: RunConfig, decoder: Decoder, optimizer: torch.optim.Optimizer, step: int, device: torch.device
) -> None:
    """Take one step on examples that the seed and the step alone decide."""
    if step >= config.final_step:
        decoder.positions.finalize()
    generator = generator_for("training", config.task.label, config.seed, step)
    batch = config.task.training_batch(config.settings.batch, generator).to(device)
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type="cuda"):
        if config.settings.dropout:
            torch.manual_seed(generator.initial_seed())
        logits, _ = decoder(batch.ids)
    loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    optimizer.step()


def _is_enough(snapshot: Snapshot, config: RunConfig) -> bool:
    """Return whether training may stop early: no error, or no better perplexity, for ``patience`` evaluations.

    Evaluations count once the positions are those of the trained decoder.
    """
    values = [result.value for step, result in snapshot.history if step > config.final_step]
    patience, counts_errors = config.settings.patience, config.task.metric == "error"
    if not patience or len(values) <= patience:
        return bool(patience) and counts_errors and values == [0.0] * patience
    last = values[-patience:]
    return not any(last) if counts_errors else min(last) >= min(values[:-patience])


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
        **({"data": dict(task.data)} if task.data else {}),
        "encodings": {
            encoding.label: {"name": encoding.name, "parameters": encoding.parameters} for encoding in encodings
        },
        "settings": {name: getattr(chosen, name) for name in parameters_of(TrainingSettings)} | {"seeds": seeds},
        "summary": _summary(task, encodings, seeds, finished),
    }
    rows = [row for config, run in finished for row in _rows(config, run)]
    return with_figure(_with_table(ExperimentRecord(head, rows).write(out)), draw_laboratory, task.caption)


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
        FORMAT, config.task.name, config.task.parameters, config.encoding.name, config.encoding.parameters, settings,
        *config.task.data.values(),
    )  # fmt: skip
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
