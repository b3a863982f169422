"""``rag-posfix lab``: small decoders, trained with each position encoding on generated tasks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, checked_output
from rag_posfix.cli.output import emit_json, experiment_step, out, table
from rag_posfix.contracts.method_spec import parse_method, split_outside

if TYPE_CHECKING:
    from rag_posfix.encodings import Encoding
    from rag_posfix.laboratory.tasks import Task

app = typer.Typer(help="Train small decoders with each position encoding on generated tasks.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Train small decoders with each position encoding on generated tasks."""


@app.command("list")
def list_laboratory(as_json: AsJson = False) -> None:
    """List tasks and encodings with their parameters."""
    found = {"tasks": _tasks(), "encodings": _encodings()}
    if as_json:
        emit_json(found)
        return
    tasks = table("task (aliases)", "measure", "what it is", "parameters", title="tasks")
    for one in found["tasks"]:
        names = " ".join([one["name"], *(f"({alias})" for alias in (*one["aliases"], *one["presets"]))])
        tasks.add_row(names, one["metric"], one["summary"], _parameters(one))
    encodings = table("encoding (aliases)", "attention memory", "what it is", "parameters", title="encodings")
    for one in found["encodings"]:
        names = " ".join([one["name"], *(f"({alias})" for alias in one["aliases"])])
        memory = one["memory"] if one["causal"] else "an auto-encoder, not for lab run"
        encodings.add_row(names, memory, one["summary"], _parameters(one))
    out().print(tasks)
    out().print(encodings)


@app.command("run")
def run(
    task: Annotated[str, typer.Argument(help="Task, as name or name:size=value; rag-posfix lab list names them.")],
    encoding: Annotated[str, typer.Option("--encoding", help="Encodings, comma-separated; name:parameter=value.")],
    output: Annotated[
        Path, typer.Option("--out", callback=checked_output, help="Folder for checkpoints, decoders and the record.")
    ],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Number of seeds.")] = 3,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Most training steps.")] = 2000,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Examples per step.")] = 32,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Of Adam, after the warm-up.")] = 1e-3,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps in which the learning rate rises.")] = 100,
    evaluate_every: Annotated[
        int, typer.Option("--evaluate-every", min=1, help="Steps between two evaluations and checkpoints.")
    ] = 200,
    examples: Annotated[int, typer.Option("--examples", min=1, help="Examples of an evaluation.")] = 512,
    patience: Annotated[
        int, typer.Option("--patience", min=0, help="Evaluations without error that stop training; 0: never.")
    ] = 3,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of the decoder.")] = 2,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Attention heads of a layer.")] = 4,
    width: Annotated[int, typer.Option("--width", min=2, help="Channels of a hidden state.")] = 64,
    norm: Annotated[str, typer.Option("--norm", help="Norm before or after a part of a layer: pre, post.")] = "pre",
    dropout: Annotated[float, typer.Option("--dropout", help="Share of channels dropped in training.")] = 0.0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, ...; auto uses a GPU if there is one.")] = (
        "auto"
    ),
    as_json: AsJson = False,
) -> None:
    """Train a decoder per encoding and seed, and measure each in and out of the training distribution.

    The same command continues after an interruption.
    """
    from rag_posfix.laboratory.experiment import run_laboratory
    from rag_posfix.laboratory.measuring import TrainingSettings

    settings = TrainingSettings(
        steps=steps, batch=batch, learning_rate=learning_rate, warmup=warmup, evaluate_every=evaluate_every,
        examples=examples, patience=patience, layers=layers, heads=heads, width=width, norm=norm,  # type: ignore[arg-type]
        dropout=dropout,
    )  # fmt: skip
    record = run_laboratory(
        _task(task), _chosen_encodings(encoding), seeds=seeds, settings=settings, device=device, out=output,
        progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show(record.to_json())


@app.command("maps")
def maps(
    decoder: Annotated[
        Path, typer.Argument(help="Folder of a decoder that lab run trained on language with cope or cope_rope.")
    ],
    output: Annotated[
        Path, typer.Option("--out", callback=checked_output, help="Folder for the record and the picture.")
    ],
    texts: Annotated[int, typer.Option("--texts", min=1, help="Number of texts for the mean gates.")] = 16,
    words: Annotated[int, typer.Option("--words", min=2, help="Words of a text.")] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the texts.")] = 0,
    people: Annotated[
        int, typer.Option("--people", help="Different people in the texts, 2 to 12, as in language:people=N.")
    ] = 12,
    as_json: AsJson = False,
) -> None:
    """Show which heads of a trained CoPE count sentences, and which count paragraphs."""
    from rag_posfix.laboratory.contextual_maps import map_contextual_positions

    record = map_contextual_positions(
        decoder, texts=texts, words=words, seed=seed, people=people, out=output, progress=experiment_step
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_maps(record.to_json())


def _show_maps(found: dict[str, Any]) -> None:
    shown = table(
        "counts", "layer", "head", "queries", "gate on these ends", "largest gate on another kind", "difference"
    )
    for name, one in found["counters"].items():
        numbers = (f"{one[key]:.2f}" for key in ("gate", "largest_other_gate", "difference"))
        shown.add_row(name, str(one["layer"]), str(one["head"]), one["query"], *numbers)
    out().print(shown)
    _show_files(found, ("record", "svg"))


def _show_files(found: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        if name in found:
            out().print(f"{name}: {found[name]}", highlight=False, soft_wrap=True)


def _task(text: str) -> Task:
    from rag_posfix.laboratory.tasks import TASKS

    made: Task = TASKS.create(parse_method(text, "task", "pairs=32"))
    return made


def _chosen_encodings(text: str) -> list[Encoding]:
    from rag_posfix.encodings import ENCODINGS

    return [ENCODINGS.create(parse_method(part, "encoding", "p_max=16")) for part in split_outside(text, ",")]


def _tasks() -> list[dict[str, Any]]:
    from rag_posfix.laboratory.tasks import TASKS

    return [
        {
            **_common(TASKS, name, cls),
            "presets": {preset: dict(values) for preset, values in TASKS.presets(name).items()},
            "metric": cls.metric,
            "splits": dict(cls().splits),
            "source": cls.source,
        }
        for name, cls in TASKS.items()
    ]


def _encodings() -> list[dict[str, Any]]:
    from rag_posfix.encodings import ENCODINGS

    return [
        {**_common(ENCODINGS, name, cls), "paper": cls.paper, "memory": cls.memory, "causal": cls.causal}
        for name, cls in ENCODINGS.items()
    ]


def _common(registry: Any, name: str, cls: Any) -> dict[str, Any]:
    """Return what tasks and encodings have in common."""
    parameters = registry.parameters(name)
    return {
        "name": name,
        "aliases": list(registry.aliases(name)),
        "summary": (inspect.getdoc(cls) or "").split("\n", 1)[0],
        "deviations": list(cls.deviations),
        "parameters": {
            key: {"type": one.type, "default": one.default, "allowed": one.allowed} for key, one in parameters.items()
        },
    }


def _parameters(one: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value['default']}" for key, value in one["parameters"].items())


def _show(found: dict[str, Any]) -> None:
    unit = "error in %" if found["metric"] == "error" else found["metric"]
    heading = f"{found['task']}: {unit}, mean over {found['seeds']} seeds (lowest to highest)"
    shown = table("encoding", *(f"{name}: {text}" for name, text in found["splits"].items()), "steps", title=heading)
    for label, one in found["encodings"].items():
        values = (f"{v['mean']:.2f} ({v['low']:.2f} to {v['high']:.2f})" for v in one["splits"].values())
        shown.add_row(label, *values, " ".join(map(str, one["steps"])))
    console = out()
    console.print(shown)
    if found["by_place"]:
        places = table("encoding", "split", "error by place, from the first pair to the last")
        for label, one in found["encodings"].items():
            for split, measured in one["splits"].items():
                places.add_row(label, split, " ".join(f"{place['mean']:.0f}" for place in measured["by_place"]))
        console.print(places)
    _show_files(found, ("record", "csv", "svg"))
