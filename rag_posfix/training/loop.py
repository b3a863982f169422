"""The training loop: steps, evaluations on held-out samples, checkpoints, early stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rag_posfix.errors import GenerationError
from rag_posfix.training.data.pair import drawn
from rag_posfix.training.data.sample import Sample
from rag_posfix.training.objectives import Objective, Term, add_gradients
from rag_posfix.training.prompts import PromptMaker
from rag_posfix.training.run_files import RunFiles, RunState, best_share, measure_places
from rag_posfix.training.settings import TrainSettings
from rag_posfix.training.tuned_model import TunedModel

_log = logging.getLogger(__name__)

MOST_GRADIENT = 1.0
"""Norm that gradients are cut to."""


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """What a model is trained on.

    Attributes:
        objective: What is trained.
        samples: What it is trained on.
        held_out: What it is evaluated on.
        settings: How it is trained.
        prompts: Makes its prompts.
    """

    objective: Objective
    samples: Sequence[Sample]
    held_out: Sequence[Sample]
    settings: TrainSettings
    prompts: PromptMaker

    def sample(self, number: int) -> Sample:
        """Return the sample that comes as the ``number``-th: each turn has all of them, in an order of its own."""
        turn, at = divmod(number, len(self.samples))
        order = list(range(len(self.samples)))
        drawn("turn", self.settings.seed, turn).shuffle(order)
        return self.samples[order[at]]


def train(
    model: TunedModel, course: Course, files: RunFiles, report: Callable[[int, int], None] = lambda done, total: None
) -> RunState:
    """Train a model, or continue where a checkpoint ends, and leave it with the weights of the best evaluation.

    A run that was interrupted gives the weights of one that was not; on one CPU with one number of threads bit for
    bit. The best evaluation is that with the highest worst place: mean log-probability per token of the answers of
    held-out samples, over all places and methods of the objective.
    """
    settings = course.settings
    optimizer = torch.optim.AdamW(
        list(model.trained().values()), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    now = files.resume(model, optimizer)
    if not now.history:
        now = _evaluated(model, course, now, 0.0)
        files.keep(model, optimizer, now)
    while now.step < settings.steps and not _is_enough(now, settings):
        now = _interval(model, course, optimizer, now, report)
        files.keep(model, optimizer, now)
    files.restore_best(model, now)
    report(settings.steps, settings.steps)
    model.loaded.model.eval()
    return now


def _interval(
    model: TunedModel,
    course: Course,
    optimizer: torch.optim.Optimizer,
    now: RunState,
    report: Callable[[int, int], None],
) -> RunState:
    """Train up to the next evaluation, evaluate, and return where the run is."""
    began, settings = time.perf_counter(), course.settings
    stop = min(settings.steps, now.step + settings.evaluate_every)
    best_place, losses = best_share(now.history[0].curves), []
    model.loaded.model.train()
    for step in range(now.step, stop):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        losses.append(_step(model, course, optimizer, step, best_place))
        report(step + 1, settings.steps)
    trained = time.perf_counter() - began
    after = _evaluated(model, course, replace(now, step=stop), sum(losses) / len(losses))
    seconds = now.seconds + time.perf_counter() - began
    rate = (stop - now.step) / trained
    _log.info(
        "step %d of %d: loss %.3f, worst place %.3f, %.2f steps/s, %.0f s remain",
        stop, settings.steps, after.history[-1].loss, after.history[-1].worst, rate, (settings.steps - stop) / rate,
    )  # fmt: skip
    return replace(after, seconds=seconds)


def _step(model: TunedModel, course: Course, optimizer: torch.optim.Optimizer, step: int, best_place: float) -> float:
    """Take one step on samples that the seed and the step alone decide; return the mean loss."""
    settings, total = course.settings, 0.0
    optimizer.zero_grad(set_to_none=True)
    for terms in _terms(model, course, step, best_place):
        for loss in add_gradients(model, terms, settings.batch, settings.packing):
            total += loss
    if not total < float("inf"):
        raise GenerationError(
            f"the loss is {total} in step {step + 1}; lower --learning-rate, or train with --dtype float32"
        )
    torch.nn.utils.clip_grad_norm_(list(model.trained().values()), MOST_GRADIENT)
    optimizer.step()
    return total / settings.batch


def _terms(model: TunedModel, course: Course, step: int, best_place: float) -> Iterator[list[Term]]:
    """Yield the terms that may share passes: with packing those of the whole step, else those of each sample."""
    settings = course.settings
    waiting: list[Term] = []
    for number in range(step * settings.batch, (step + 1) * settings.batch):
        random = drawn("sample", settings.seed, number)
        waiting += course.objective.terms(model.loaded, course.prompts, course.sample(number), random, best_place)
        if not settings.packing:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def _evaluated(model: TunedModel, course: Course, now: RunState, loss: float) -> RunState:
    found = measure_places(model, course.prompts, course.objective, course.held_out, course.settings.places)
    return now.evaluated(found, loss)


def _is_enough(now: RunState, settings: TrainSettings) -> bool:
    return bool(settings.patience) and now.evaluations_since_best() >= settings.patience
