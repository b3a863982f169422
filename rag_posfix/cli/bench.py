"""``rag-posfix bench``: what each method costs, next to the unmodified model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, ModelName, checked_choices, settings_from
from rag_posfix.cli.output import emit_json, out, progress_bar, status

__all__ = ["bench"]


def bench(
    documents: Annotated[int, typer.Option("--documents", min=1, help="Passages in the prompt.")] = 20,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each passage.")] = 150,
    mitigation: Annotated[str | None, typer.Option("--mitigation", help="Names, comma-separated; else all.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds; ratios are medians over them.")] = 3,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Decode steps per round.")] = 16,
    model: ModelName = None,
    output: Annotated[Path | None, typer.Option("--out", help="Folder for a result record.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time to first token, tokens per second and memory of each method, as ratios to the unmodified model."""
    choices = None if mitigation is None else checked_choices(mitigation)
    settings = settings_from(model=model)
    with status("loading the model"):
        from rag_posfix.evaluation.record import write_record
        from rag_posfix.evaluation.speed import bench_layout, bench_record, measure, summarize_speed
        from rag_posfix.generation.models import load_engine
        from rag_posfix.generation.request import MitigationChoice
        from rag_posfix.mitigations import MITIGATIONS

        engine = load_engine(
            settings.model, dtype=settings.dtype, device=settings.device, cache_dir=settings.cache_dir
        )
    layout = bench_layout(engine.encoder, documents, tokens)
    if choices is None:
        choices = [MitigationChoice(name) for name in MITIGATIONS.names()]
    with progress_bar("measuring") as progress:
        found = measure(engine, layout, choices, repeats=repeats, new_tokens=new_tokens, progress=progress)
    summary = {
        **summarize_speed(found),
        "model": engine.model_id,
        "device": str(engine.loaded.device),
        "dtype": str(engine.loaded.model.dtype).removeprefix("torch."),
        "documents": documents,
        "tokens_per_document": tokens,
        "prompt_tokens": len(layout.token_ids),
    }
    if output is not None:
        used = {"documents": documents, "tokens": tokens, "repeats": repeats, "new_tokens": new_tokens}
        summary["record"] = str(write_record(output, "bench", bench_record(engine, found, summary, used)))
    if as_json:
        emit_json(summary)
    else:
        _show(summary)


def _show(summary: dict[str, Any]) -> None:
    from rich.table import Column, Table

    stock = summary["unmodified"]
    console = out()
    console.print(
        f"{summary['model']}, {summary['dtype']} on {summary['device']}: {summary['documents']} passages of "
        f"{summary['tokens_per_document']} tokens, {summary['prompt_tokens']} in all\n"
        f"unmodified: {stock['ttft_s']:.3f} s to the first token, {stock['decode_tokens_per_s']:.1f} tokens/s, "
        f"{_megabytes(stock['peak_memory_bytes'])} at most",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    table = Table(
        Column("method", no_wrap=True),
        *(f"{name} x" for name in ("first token", "tokens/s", "memory", "memory added")),
    )
    for name, found in summary["methods"].items():
        keys = ("ttft_cold_ratio", "decode_ratio", "memory_ratio", "memory_extra_ratio")
        table.add_row(name, *("-" if found[key] is None else f"{found[key]:.2f}" for key in keys))
    console.print(table)
    console.print("x: method / unmodified; lower is better, for tokens/s higher", highlight=False)
    for name, reason in summary["refused"].items():
        console.print(f"refused: {name}: {reason}", highlight=False, soft_wrap=True)
    if "record" in summary:
        console.print(f"record: {summary['record']}", highlight=False, soft_wrap=True)


def _megabytes(count: int | None) -> str:
    return "unknown memory" if count is None else f"{count / 1e6:.0f} MB"
