"""One training run: a model and a file of samples in, an adapter or a model and a record out."""

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
from rag_posfix.training.data.sample import Sample, read_samples
from rag_posfix.training.loop import TrainingRun, train
from rag_posfix.training.objectives import Objective
from rag_posfix.training.prompts import PromptMaker
from rag_posfix.training.run_files import RunFiles, RunState, shares
from rag_posfix.training.settings import TrainSettings
from rag_posfix.training.tuned_model import prepare

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    state = files.finished() if tuned.is_dir() else None
    facts, parameters = model_facts(engine), 0
    if state is None:
        model = prepare(engine, settings, base, teacher)
        parameters = sum(tensor.numel() for tensor in model.trained().values())
        training_run = new_training_run(engine, objective, samples, settings)
        with progress(f"{objective.name}: {parameters} of the weights are trained, steps") as report:
            state = train(model, training_run, files, report)
        tuned = model.save(out)
        files.finish(state)
    head = {
        "kind": f"train-{objective.name}", **environment(), **facts, "settings": asdict(settings), "run": run,
        "objective": objective_facts, "data": {"name": data.name, "sha256": digest, "samples": len(samples)},
        "trained_parameters": parameters, "summary": _summary(objective, state, settings),
    }  # fmt: skip
    record = ExperimentRecord(head, [_row(evaluation) for evaluation in state.as_json()["history"]], {}).write(out)
    record = with_figure(record, draw_training)
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


def draw_training(head: Mapping[str, Any]) -> Figure:
    """Return the figure of a training record: the worst place of the held-out samples by step."""
    summary = head["summary"]
    figure, axes = new_axes((5.4, 3.0))
    axes.plot(summary["steps_of_evaluations"], summary["worst"], marker="o", markersize=4, color=OTHER_COLORS[0])
    axes.set_xlabel("steps")
    axes.set_ylabel("log-probability per token,\nworst place")
    axes.set_title(f"{summary['objective']}: held-out samples", fontsize=10, loc="left")
    return figure
