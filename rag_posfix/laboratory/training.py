"""Training of one decoder on one task: steps, evaluations, checkpoints, early stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import cross_entropy

from rag_posfix.encodings.base import Encoding
from rag_posfix.encodings.decoder import Decoder
from rag_posfix.laboratory.measuring import TrainingSettings, generator_for, measure
from rag_posfix.laboratory.run_files import FinishedRun, RunFiles, Snapshot
from rag_posfix.laboratory.tasks.base import IGNORED, TRAINED, Task

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
