"""``rag-posfix train in2|block|distill``: fine-tuning against position bias."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.dataclass_options import with_options_of
from rag_posfix.cli.options import AsJson, DeviceName, ModelName, checked_choice, checked_output, settings_from
from rag_posfix.cli.output import emit_json, experiment_step, out, status, table
from rag_posfix.errors import ConfigError
from rag_posfix.training.settings import TrainSettings

if TYPE_CHECKING:
    from rag_posfix.mitigations.base import Mitigation
    from rag_posfix.settings import Settings
    from rag_posfix.training.objectives import Objective

Data = Annotated[Path, typer.Option("--data", help="Samples, as rag-posfix train data writes them.")]
Out = Annotated[
    Path, typer.Option("--out", callback=checked_output, help="Folder for checkpoint, record and adapter or model.")
]
Method = Annotated[str, typer.Option("--mitigation", help="Method that the model is trained under.")]
BlockMethod = Annotated[str, typer.Option("--mitigation", help="Method with independent passages.")]
Anchor = Annotated[float, typer.Option("--anchor", min=0, help="Weight of the divergence at the best place.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.1, help="Divisor of the logits of both.")]


@with_options_of(TrainSettings, "settings")
def in2(
    data: Data,
    output: Out,
    settings: TrainSettings,
    mitigation: Method = "none",
    model: ModelName = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Train answers that depend on short passages anywhere in the prompt (IN2).

    The same command continues after an interruption.
    """
    from rag_posfix.training.objectives import InformationIntensive

    objective = InformationIntensive(_method(mitigation))
    _run(objective, data, output, settings, settings_from(model=model, device=device), as_json)


@with_options_of(TrainSettings, "settings")
def block(
    data: Data,
    output: Out,
    settings: TrainSettings,
    mitigation: BlockMethod = "parallel_windows",
    model: ModelName = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Train each sample under two masks: independent passages and a final block, and the full causal mask.

    The same command continues after an interruption.
    """
    from rag_posfix.training.objectives import Block

    objective = Block(_method("none"), _method(mitigation))
    _run(objective, data, output, settings, settings_from(model=model, device=device), as_json)


@with_options_of(TrainSettings, "settings")
def distill(
    data: Data,
    output: Out,
    settings: TrainSettings,
    mitigation: Method = "none",
    anchor: Anchor = 1.0,
    temperature: Temperature = 1.0,
    model: ModelName = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Train the model to say with the gold passage anywhere what it said, untrained, with it at its best place.

    The same command continues after an interruption.
    """
    from rag_posfix.training.objectives import Distill

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
