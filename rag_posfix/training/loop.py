"""The training loop: steps, evaluations on held-out samples, checkpoints, early stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rag_posfix.errors import GenerationError
from rag_posfix.training.data.pair import seeded_random
from rag_posfix.training.data.sample import Sample
from rag_posfix.training.objectives import LossTerm, Objective, add_gradients
from rag_posfix.training.prompts import PromptMaker
from rag_posfix.training.run_files import RunFiles, RunState, best_share, measure_places
from rag_posfix.training.settings import TrainSettings
from rag_posfix.training.tuned_model import TunedModel

_log = logging.getLogger(__name__)

MOST_GRADIENT = 1.0
"""Norm that gradients are cut to."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRun:
    """The objective of one training, its samples, those that are held out, and the maker of their prompts."""

    objective: Objective
    samples: Sequence[Sample]
    held_out: Sequence[Sample]
    settings: TrainSettings
    prompts: PromptMaker

    def sample(self, number: int) -> Sample:
        """Return the sample that comes as the ``number``-th: each turn has all of them, in an order of its own."""
        turn, index = divmod(number, len(self.samples))
        order = list(range(len(self.samples)))
        seeded_random("turn", self.settings.seed, turn).shuffle(order)
        return self.samples[order[index]]


def train(
    model: TunedModel, run: TrainingRun, files: RunFiles, report: Callable[[int, int], None] = lambda done, total: None
) -> RunState:
    """Train a model, or continue where a checkpoint ends, and leave it with the weights of the best evaluation.

    A run that was interrupted gives the weights of one that was not; on one CPU with one number of threads bit for
    bit. The best evaluation is that with the highest worst place: mean log-probability per token of the answers of
    held-out samples, over all places and methods of the objective.
    """
    settings = run.settings
    optimizer = torch.optim.AdamW(
        list(model.trained().values()), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    state = files.resume(model, optimizer)
    if not state.history:
        state = _evaluate(model, run, state, 0.0)
        files.keep(model, optimizer, state)
    while state.step < settings.steps and not _is_enough(state, settings):
        state = _train_interval(model, run, optimizer, state, report)
        files.keep(model, optimizer, state)
    files.restore_best(model, state)
    report(settings.steps, settings.steps)
    model.loaded.model.eval()
    return state


def _train_interval(
    model: TunedModel,
    run: TrainingRun,
    optimizer: torch.optim.Optimizer,
    state: RunState,
    report: Callable[[int, int], None],
) -> RunState:
    """Train up to the next evaluation, evaluate, and return where the run is."""
    began, settings = time.perf_counter(), run.settings
    stop = min(settings.steps, state.step + settings.evaluate_every)
    best_place, losses = best_share(state.history[0].curves), []
    model.loaded.model.train()
    for step in range(state.step, stop):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        losses.append(_step(model, run, optimizer, step, best_place))
        report(step + 1, settings.steps)
    trained = time.perf_counter() - began
    after = _evaluate(model, run, replace(state, step=stop), sum(losses) / len(losses))
    seconds = state.seconds + time.perf_counter() - began
    rate = (stop - state.step) / trained
    _log.info(
        "step %d of %d: loss %.3f, worst place %.3f, %.2f steps/s, %.0f s remain",
        stop, settings.steps, after.history[-1].loss, after.history[-1].worst, rate, (settings.steps - stop) / rate,
    )  # fmt: skip
    return replace(after, seconds=seconds)


def _step(
    model: TunedModel, run: TrainingRun, optimizer: torch.optim.Optimizer, step: int, best_place: float
) -> float:
    """Take one step on samples that the seed and the step alone decide; return the mean loss."""
    settings, total = run.settings, 0.0
    optimizer.zero_grad(set_to_none=True)
    for terms in _terms(model, run, step, best_place):
        for loss in add_gradients(model, terms, settings.batch, settings.packing):
            total += loss
    if not total < float("inf"):
        raise GenerationError(
            f"the loss is {total} in step {step + 1}; lower --learning-rate, or train with --dtype float32"
        )
    torch.nn.utils.clip_grad_norm_(list(model.trained().values()), MOST_GRADIENT)
    optimizer.step()
    return total / settings.batch


def _terms(model: TunedModel, run: TrainingRun, step: int, best_place: float) -> Iterator[list[LossTerm]]:
    """Yield the terms that may share passes: with packing those of the whole step, else those of each sample."""
    settings = run.settings
    waiting: list[LossTerm] = []
    for number in range(step * settings.batch, (step + 1) * settings.batch):
        random = seeded_random("sample", settings.seed, number)
        waiting += run.objective.terms(model.loaded, run.prompts, run.sample(number), random, best_place)
        if not settings.packing:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def _evaluate(model: TunedModel, run: TrainingRun, state: RunState, loss: float) -> RunState:
    curves = measure_places(model, run.prompts, run.objective, run.held_out, run.settings.places)
    return state.with_evaluation(curves, loss)


def _is_enough(state: RunState, settings: TrainSettings) -> bool:
    return bool(settings.patience) and state.evaluations_since_best() >= settings.patience
