"""The training loop: steps, evaluations on held-out samples, checkpoints, early stop; runs from data to record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.figures import OTHER_COLORS, new_axes, with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, file_digest, model_facts, silent
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.lab.training.data.make_data import Sample, read_samples
from rag_posfix.lab.training.data.settings import TrainSettings
from rag_posfix.lab.training.objectives import Objective
from rag_posfix.lab.training.prompts import PromptMaker
from rag_posfix.lab.training.run_files import RunFiles, RunState, shares
from rag_posfix.lab.training.tuned_model import prepare

if TYPE_CHECKING:
    from matplotlib.figure import Figure
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rag_posfix.errors import GenerationError
from rag_posfix.lab.training.data.pairs import seeded_random
from rag_posfix.lab.training.objectives import LossTerm, add_gradients
from rag_posfix.lab.training.run_files import best_share, measure_places
from rag_posfix.lab.training.tuned_model import TunedModel

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
    model.begin_steps()
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


def tune(
    engine: Engine,
    objective: Objective,
    data: Path,
    settings: TrainSettings,
    out: Path,
    *,
    base: str,
    teacher: LoadedModel | None = None,
    progress: Progress = silent,
) -> ExperimentRecord:
    """Train the model of an engine on a file of samples, and write what came out of it.

    The last ``settings.held_out`` samples are evaluated; they, and others with their questions, are not trained on.
    The same call continues after an interruption; a finished run is not repeated.

    Args:
        teacher: As in ``prepare``.
    """
    samples = list(read_samples(data))
    if len(samples) <= settings.held_out:
        raise ConfigError(
            f"{data} has {len(samples)} samples, and {settings.held_out} of them are held out; make more, or lower "
            "--held-out"
        )
    digest = file_digest(data)
    objective_facts = _facts(objective)
    run = settings.digest(model=engine.fingerprint, data=digest, objective=objective_facts)
    files = RunFiles(out, run)
    tuned = out / ("adapter" if settings.rank else "model")
    state = files.finished()  # also without that folder: another run may have finished with one of the other kind
    facts = model_facts(engine)
    if state is None or not tuned.is_dir():
        model = prepare(engine, settings, base, teacher)
        parameters = sum(tensor.numel() for tensor in model.trained().values())
        training_run = new_training_run(engine, objective, samples, settings)
        with progress(f"{objective.name}: {parameters} of the weights are trained, steps") as report:
            state = replace(train(model, training_run, files, report), trained_parameters=parameters)
        tuned = model.save(out)
        files.finish(state)
    head = {
        "kind": f"train-{objective.name}", **environment(), **facts, "settings": asdict(settings), "run": run,
        "objective": objective_facts, "data": {"name": data.name, "sha256": digest, "samples": len(samples)},
        "trained_parameters": state.trained_parameters, "summary": _summary(objective, state, settings),
    }  # fmt: skip
    record = ExperimentRecord(head, [_row(evaluation) for evaluation in state.as_json()["history"]], {}).write(out)
    record = with_figure(record, draw_training, CAPTION)
    return replace(record, files={**record.files, tuned.name: tuned})


def new_training_run(
    engine: Engine, objective: Objective, samples: list[Sample], settings: TrainSettings
) -> TrainingRun:
    """Return the data of a run; the last samples are held out for evaluation, and their questions with them."""
    cut = len(samples) - settings.held_out
    prompts = PromptMaker(engine.encoder, engine.context_window)
    held_out = samples[cut:]
    held_out_questions = {
        sample.question for sample in held_out
    }  # a file that repeats its pairs would measure what was trained on
    trained = [sample for sample in samples[:cut] if sample.question not in held_out_questions]
    if not trained:
        raise ConfigError(
            f"all questions are among those of the {len(held_out)} held-out samples; make data from more pairs, or "
            "lower --held-out"
        )
    return TrainingRun(objective, trained, held_out, settings, prompts)


def _facts(objective: Objective) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": objective.name}
    facts["methods"] = {method.name: method.fingerprint() for method in objective.methods}
    facts |= {name: getattr(objective, name) for name in ("anchor", "temperature") if hasattr(objective, name)}
    return facts


def _row(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": evaluation["step"],
        "loss": evaluation["loss"],
        **{f"{name}": list(curve) for name, curve in evaluation["curves"].items()},
    }


def _summary(objective: Objective, state: RunState, settings: TrainSettings) -> dict[str, Any]:
    before, best = state.history[0], state.best
    return {
        "objective": objective.name,
        "steps": state.step,
        "seconds": state.seconds,
        "best_step": best.step,
        "places": list(shares(settings.places)),
        "before": {"worst": before.worst, "log_probability": before.curves},
        "after": {"worst": best.worst, "log_probability": best.curves},
        "steps_of_evaluations": [evaluation.step for evaluation in state.history],
        "worst": [evaluation.worst for evaluation in state.history],
        "loss": [evaluation.loss for evaluation in state.history[1:]],
    }


CAPTION = (
    "The log-probability of held-out samples at their worst position by training step; do not conclude a gain on "
    "other documents, since these samples were made as those of the training were."
)


def draw_training(head: Mapping[str, Any]) -> Figure:
    """Return the figure of a training record: the worst place of the held-out samples by step."""
    summary = head["summary"]
    figure, axes = new_axes((5.4, 3.0))
    axes.plot(summary["steps_of_evaluations"], summary["worst"], marker="o", markersize=4, color=OTHER_COLORS[0])
    axes.set_xlabel("steps")
    axes.set_ylabel("log-probability per token,\nworst place")
    axes.set_title(f"{summary['objective']}: held-out samples", fontsize=10, loc="left")
    return figure
