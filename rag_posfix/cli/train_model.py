"""``rag-posfix train in2|block|distill``: fine-tuning against position bias."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, DeviceName, ModelName, checked_choice, checked_output, settings_from
from rag_posfix.cli.output import emit_json, experiment_step, out, status, table
from rag_posfix.errors import ConfigError

if TYPE_CHECKING:
    from rag_posfix.mitigations.base import Mitigation
    from rag_posfix.settings import Settings
    from rag_posfix.training.objectives import Objective
    from rag_posfix.training.settings import TrainSettings

__all__ = ["block", "distill", "in2"]

Data = Annotated[Path, typer.Option("--data", help="Samples, as rag-posfix train data writes them.")]
Out = Annotated[
    Path, typer.Option("--out", callback=checked_output, help="Folder for checkpoint, record and adapter or model.")
]
Method = Annotated[str, typer.Option("--mitigation", help="Method that the model is trained under.")]
BlockMethod = Annotated[str, typer.Option("--mitigation", help="Method with independent passages.")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Most steps.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Samples per step, whose gradients are accumulated.")]
LearningRate = Annotated[float, typer.Option("--learning-rate", help="Of AdamW, after the warm-up.")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Steps in which the learning rate rises.")]
Rank = Annotated[int, typer.Option("--rank", min=0, help="Rank of the LoRA matrices; 0 trains all weights.")]
Alpha = Annotated[float, typer.Option("--alpha", help="Scale of LoRA: its product is multiplied by alpha / rank.")]
Targets = Annotated[
    str, typer.Option("--targets", help="Modules with LoRA: all-linear, or names such as q_proj,v_proj.")
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="auto, bfloat16 or float32. With --rank 0 weights stay float32, and so does auto."),
]
Checkpointing = Annotated[
    bool, typer.Option("--checkpointing", help="Compute layers again for the gradient: less memory, more time.")
]
EvaluateEvery = Annotated[
    int, typer.Option("--evaluate-every", min=1, help="Steps between two evaluations and checkpoints.")
]
HeldOut = Annotated[
    int, typer.Option("--held-out", min=1, help="Samples at the end of the file that are evaluated, not trained on.")
]
Places = Annotated[int, typer.Option("--places", min=2, help="Places of the gold passages in an evaluation.")]
Patience = Annotated[
    int,
    typer.Option("--patience", min=0, help="Evaluations without a better worst place that end it; 0: never."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the order of samples and the start of LoRA.")]
Anchor = Annotated[float, typer.Option("--anchor", min=0, help="Weight of the divergence at the best place.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.1, help="Divisor of the logits of both.")]


def in2(
    data: Data,
    output: Out,
    mitigation: Method = "none",
    steps: Steps = 200,
    batch: Batch = 8,
    learning_rate: LearningRate = 0.0001,
    warmup: Warmup = 10,
    rank: Rank = 16,
    alpha: Alpha = 32.0,
    targets: Targets = "all-linear",
    dtype: Dtype = "auto",
    checkpointing: Checkpointing = False,
    evaluate_every: EvaluateEvery = 50,
    held_out: HeldOut = 16,
    places: Places = 3,
    patience: Patience = 3,
    seed: Seed = 0,
    model: ModelName = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Train answers that depend on short passages anywhere in the prompt (IN2).

    The same command continues after an interruption.
    """
    from rag_posfix.training.objectives import InformationIntensive
    from rag_posfix.training.settings import TrainSettings

    settings = TrainSettings(
        steps=steps, batch=batch, learning_rate=learning_rate, warmup=warmup, rank=rank, alpha=alpha, targets=targets,
        dtype=dtype, checkpointing=checkpointing, evaluate_every=evaluate_every, held_out=held_out,  # type: ignore[arg-type]
        places=places, patience=patience, seed=seed,
    )  # fmt: skip
    _run(InformationIntensive(_method(mitigation)), data, output, settings, settings_from(model=model, device=device),
         as_json)  # fmt: skip


def block(
    data: Data,
    output: Out,
    mitigation: BlockMethod = "parallel_windows",
    steps: Steps = 200,
    batch: Batch = 8,
    learning_rate: LearningRate = 0.0001,
    warmup: Warmup = 10,
    rank: Rank = 16,
    alpha: Alpha = 32.0,
    targets: Targets = "all-linear",
    dtype: Dtype = "auto",
    checkpointing: Checkpointing = False,
    evaluate_every: EvaluateEvery = 50,
    held_out: HeldOut = 16,
    places: Places = 3,
    patience: Patience = 3,
    seed: Seed = 0,
    model: ModelName = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Train each sample under two masks: independent passages and a final block, and the full causal mask.

    The same command continues after an interruption.
    """
    from rag_posfix.training.objectives import Block
    from rag_posfix.training.settings import TrainSettings

    settings = TrainSettings(
        steps=steps, batch=batch, learning_rate=learning_rate, warmup=warmup, rank=rank, alpha=alpha, targets=targets,
        dtype=dtype, checkpointing=checkpointing, evaluate_every=evaluate_every, held_out=held_out,  # type: ignore[arg-type]
        places=places, patience=patience, seed=seed,
    )  # fmt: skip
    objective = Block(_method("none"), _method(mitigation))
    _run(objective, data, output, settings, settings_from(model=model, device=device), as_json)


def distill(
    data: Data,
    output: Out,
    mitigation: Method = "none",
    anchor: Anchor = 1.0,
    temperature: Temperature = 1.0,
    steps: Steps = 200,
    batch: Batch = 8,
    learning_rate: LearningRate = 0.0001,
    warmup: Warmup = 10,
    rank: Rank = 16,
    alpha: Alpha = 32.0,
    targets: Targets = "all-linear",
    dtype: Dtype = "auto",
    checkpointing: Checkpointing = False,
    evaluate_every: EvaluateEvery = 50,
    held_out: HeldOut = 16,
    places: Places = 3,
    patience: Patience = 3,
    seed: Seed = 0,
    model: ModelName = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Train the model to say with the gold passage anywhere what it said, untrained, with it at its best place.

    The same command continues after an interruption.
    """
    from rag_posfix.training.objectives import Distill
    from rag_posfix.training.settings import TrainSettings

    settings = TrainSettings(
        steps=steps, batch=batch, learning_rate=learning_rate, warmup=warmup, rank=rank, alpha=alpha, targets=targets,
        dtype=dtype, checkpointing=checkpointing, evaluate_every=evaluate_every, held_out=held_out,  # type: ignore[arg-type]
        places=places, patience=patience, seed=seed,
    )  # fmt: skip
    objective = Distill(_method(mitigation), anchor, temperature)
    _run(objective, data, output, settings, settings_from(model=model, device=device), as_json)


def _method(text: str) -> Mitigation:
    from rag_posfix.mitigations import create

    choice = checked_choice(text)
    return create(choice.name, choice.parameters)


def _run(
    objective: Objective, data: Path, output: Path, settings: TrainSettings, chosen: Settings, as_json: bool
) -> None:
    from rag_posfix.generation.load import source_of
    from rag_posfix.pipeline.build import build_engine
    from rag_posfix.training.tune import tune

    if chosen.adapter is not None:
        raise ConfigError(
            f"adapter={str(chosen.adapter)!r} is set, and training adds one of its own; unset RAG_POSFIX_ADAPTER"
        )
    dtype = settings.dtype if settings.rank else "float32"
    chosen = chosen.model_copy(update={"dtype": dtype})
    with status("loading the model"):
        engine = build_engine(chosen)
        teacher = build_engine(chosen).loaded if objective.needs_teacher and not settings.rank else None
    base = source_of(chosen.model, chosen.cache_dir)
    record = tune(
        engine, objective, data, settings, output, base=base, teacher=teacher, progress=experiment_step
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show(record.to_json())


def _show(found: dict[str, Any]) -> None:
    console = out()
    title = f"{found['objective']}: log-probability per token on held-out samples, step {found['best_step']} was best"
    shown = table("method", "", "by place, from first to last", "worst", title=title)
    for name in found["before"]["log_probability"]:
        for when in ("before", "after"):
            curve = found[when]["log_probability"][name]
            shown.add_row(name, when, " ".join(f"{one:.2f}" for one in curve), f"{min(curve):.2f}")
    console.print(shown)
    for name in ("adapter", "model", "record", "svg"):
        if name in found:
            console.print(f"{name}: {found[name]}", highlight=False, soft_wrap=True)
