"""``rag-posfix probe``: measurements of how a model uses positions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import AdapterFolder, AsJson, DeviceName, ModelName, checked_output, settings_from
from rag_posfix.cli.output import emit_json, experiment_step, out, table

__all__ = ["app", "positional_dimensions", "retrieval_heads", "slot_attention"]

app = typer.Typer(help="Measure how a model uses positions.", no_args_is_help=True)

Out = Annotated[Path, typer.Option("--out", callback=checked_output, help="Folder for the profile.")]


@app.callback()
def group() -> None:
    """Measure how a model uses positions."""


@app.command("positional-dimensions")
def positional_dimensions(
    output: Out,
    strings: Annotated[int, typer.Option("--strings", min=1, help="Number of random token sequences.")] = 100,
    tokens: Annotated[int, typer.Option("--tokens", min=64, help="Tokens per sequence.")] = 1000,
    top: Annotated[int, typer.Option("--top", min=1, help="Number of candidate channels to report.")] = 10,
    factor: Annotated[
        float, typer.Option("--factor", help="Scaling factor of hidden_scaling that the profile contains.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random tokens.")] = 0,
    model: ModelName = None,
    adapter: AdapterFolder = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Find the hidden channel that varies most smoothly with the position, and write a profile for hidden_scaling."""
    from rag_posfix.probing.positional_channels import probe_positional_channels

    record = probe_positional_channels(
        strings=strings, tokens=tokens, top=top, factor=factor, seed=seed,
        settings=settings_from(model=model, adapter=adapter, device=device), out=output, progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_channels(record.to_json())


@app.command("slot-attention")
def slot_attention(
    data: Annotated[Path, typer.Option("--data", help="Lost-in-the-Middle rows, .jsonl or .jsonl.gz.")],
    output: Out,
    documents: Annotated[int, typer.Option("--documents", min=2, help="Number of passages per prompt.")] = 10,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of questions.")] = 20,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Number of questions to leave out at the start.")] = 0,
    model: ModelName = None,
    adapter: AdapterFolder = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Measure the attention to a dummy passage in each slot, and write a profile for calibrated_attention."""
    from rag_posfix.probing.slot_attention import probe_slot_attention

    record = probe_slot_attention(
        data, documents=documents, limit=limit, skip=skip,
        settings=settings_from(model=model, adapter=adapter, device=device), out=output, progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_slots(record.to_json())


@app.command("retrieval-heads")
def retrieval_heads(
    data: Annotated[
        Path,
        typer.Option("--data", help="Lost-in-the-Middle or HotpotQA rows, or a file in SQuAD's format; .gz or plain."),
    ],
    output: Out,
    documents: Annotated[int, typer.Option("--documents", min=2, help="Number of passages per prompt.")] = 10,
    limit: Annotated[int, typer.Option("--limit", min=2, help="Maximum number of questions.")] = 40,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Number of questions to leave out at the start.")] = 0,
    keep: Annotated[int, typer.Option("--heads", min=1, help="Number of heads in the list.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the order of the passages.")] = 0,
    model: ModelName = None,
    adapter: AdapterFolder = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Rank attention heads by how well they find the gold passage, and write a list for the reranker in_context."""
    from rag_posfix.probing.retrieval_heads import probe_retrieval_heads

    record = probe_retrieval_heads(
        data, documents=documents, limit=limit, skip=skip, keep=keep, seed=seed,
        settings=settings_from(model=model, adapter=adapter, device=device), out=output, progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_heads(record.to_json())


def _show_channels(found: dict[str, Any]) -> None:

    shown = table("channel", "layers with a monotonic trend", "roughness")
    for one in found["candidates"]:
        shown.add_row(str(one["channel"]), str(len(one["layers"])), f"{one['roughness']:.3g}")
    out().print(shown)
    path = found["profile"]
    out().print(f"profile: {path}", highlight=False)
    out().print(f"to use it: --mitigation hidden_scaling:profile={path}", highlight=False, soft_wrap=True)


def _show_slots(found: dict[str, Any]) -> None:

    mean = sum(found["slots"]) / len(found["slots"])
    shown = table("slot", "attention per token", "relative to the mean")
    for slot, value in enumerate(found["slots"]):
        shown.add_row(str(slot), f"{value:.3g}", f"{value / mean:.2f}")
    path = found["profile"]
    out().print(shown)
    out().print(f"profile: {path}", highlight=False, soft_wrap=True)
    out().print(f"to use it: --mitigation calibrated_attention:profile={path}", highlight=False, soft_wrap=True)
    out().print(f"or, to order passages by it: --order profile:file={path}", highlight=False, soft_wrap=True)


def _show_heads(found: dict[str, Any]) -> None:

    shown = table("layer", "head", "gain (nDCG@10)")
    for (layer, head), gain in zip(found["heads"], found["gains"], strict=True):
        shown.add_row(str(layer), str(head), f"{gain:.2f}")
    console, path, held_out = out(), found["profile"], found["held_out"]
    console.print(shown)
    console.print(
        f"together, on questions that they were not chosen on: recall@1 {held_out['recall_at_1']:.2f}, recall@3 "
        f"{held_out['recall_at_3']:.2f}",
        highlight=False,
    )
    console.print(f"list: {path}", highlight=False, soft_wrap=True)
    console.print(f"to use it: --reranker in_context:heads={path}", highlight=False, soft_wrap=True)
