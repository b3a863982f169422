"""``rag-posfix probe``: what a model does with positions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, ModelName, settings_from
from rag_posfix.cli.output import emit_json, out, progress_bar, status
from rag_posfix.cli.probe_slots import slot_attention
from rag_posfix.errors import UnsupportedModelError

__all__ = ["app", "positional_dimensions"]

app = typer.Typer(help="Measure what a model does with positions.", no_args_is_help=True)

Out = Annotated[Path, typer.Option("--out", help="Folder for the result.")]


app.command("slot-attention")(slot_attention)


@app.callback()
def group() -> None:
    """Measure what a model does with positions."""


@app.command("positional-dimensions")
def positional_dimensions(
    output: Out,
    strings: Annotated[int, typer.Option("--strings", min=1, help="Strings of random tokens to read.")] = 100,
    tokens: Annotated[int, typer.Option("--tokens", min=64, help="Tokens of each string.")] = 1000,
    top: Annotated[int, typer.Option("--top", min=1, help="Candidates to keep.")] = 10,
    factor: Annotated[float, typer.Option("--factor", help="The factor that the profile asks for.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the random tokens.")] = 0,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Find the hidden channel that follows the position most smoothly, and write a profile for hidden_scaling."""
    settings = settings_from(model=model)
    with status("loading the model"):
        from rag_posfix.evaluation.record import environment, write_record
        from rag_posfix.generation.load import load_engine
        from rag_posfix.mitigations import create
        from rag_posfix.mitigations.hidden_scaling import default_layers
        from rag_posfix.probing.positional_channels import mean_hidden_states, rank_channels

        create("hidden_scaling", {"factor": factor})  # an error in the factor is told before the work
        engine = load_engine(
            settings.model, dtype=settings.dtype, device=settings.device, cache_dir=settings.cache_dir
        )
    with progress_bar("reading random text") as progress:
        means = mean_hidden_states(engine.loaded, strings, tokens, seed, progress)
    found = rank_channels(means, top)
    if not found:
        raise UnsupportedModelError(
            f"no hidden channel of {engine.model_id} follows the position in more than a quarter of its layers; "
            "hidden_scaling has nothing to scale there; try more --strings or --tokens"
        )
    layers = default_layers(engine.loaded.spec.shape.n_layers)
    profile: dict[str, Any] = {
        "channel": found[0].channel,
        "factor": factor,
        "layers": [layers.start, layers.stop - 1],
        "candidates": [{"channel": one.channel, "layers": one.layers, "roughness": one.roughness} for one in found],
        "model": engine.model_id,
        "model_fingerprint": engine.fingerprint,
        "settings": {"strings": strings, "tokens": tokens, "seed": seed},
        "environment": environment(),
    }
    path = str(write_record(output, "positional-dimensions", profile))
    if as_json:
        emit_json({"profile": path, **{key: profile[key] for key in ("channel", "factor", "layers", "candidates")}})
        return
    _show(profile, path)


def _show(profile: dict[str, Any], path: str) -> None:
    from rich.table import Table

    table = Table("channel", "layers that follow the position", "roughness")
    for one in profile["candidates"]:
        table.add_row(str(one["channel"]), str(len(one["layers"])), f"{one['roughness']:.3g}")
    out().print(table)
    out().print(f"profile: {path}", highlight=False)
    out().print(f"to use it: --mitigation hidden_scaling:profile={path}", highlight=False, soft_wrap=True)
