"""``rag-posfix bench``: time and memory of each method, relative to the unmodified model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import (
    AdapterFolder,
    AsJson,
    DeviceName,
    ModelName,
    checked_choices,
    checked_output,
    settings_from,
)
from rag_posfix.cli.output import emit_json, experiment_step, out, table

_COLUMNS = {
    "ttft_cold_ratio": "cold",
    "ttft_warm_memory_ratio": "warm",
    "ttft_warm_disk_ratio": "disk",
    "ttft_warm_redis_ratio": "Redis",
    "decode_ratio": "tokens/s",
    "together_ratio": "together",
    "memory_ratio": "memory",
    "memory_extra_ratio": "added",
}


def bench(
    documents: Annotated[int, typer.Option("--documents", min=1, help="Number of passages in the prompt.")] = 20,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens per passage.")] = 150,
    mitigation: Annotated[
        str | None, typer.Option("--mitigation", help="Methods, comma-separated.", show_default="all")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Number of rounds; ratios are medians.")] = 3,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Decode steps per round.")] = 16,
    together: Annotated[
        int, typer.Option("--together", min=0, help="Also measure this number of concurrent requests; 0: do not.")
    ] = 0,
    warm: Annotated[
        bool, typer.Option("--warm/--no-warm", help="Also measure the time to first token with cached passages.")
    ] = True,
    redis_url: Annotated[
        str | None,
        typer.Option(
            "--redis-url",
            help="Also measure a Redis tier at this URL; its entries are not cleared.",
            show_default="no Redis tier",
        ),
    ] = None,
    model: ModelName = None,
    adapter: AdapterFolder = None,
    device: DeviceName = None,
    output: Annotated[
        Path | None,
        typer.Option("--out", callback=checked_output, help="Folder for a result record.", show_default="no record"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure time to first token, tokens per second and memory of each method, as ratios to the unmodified model."""
    from rag_posfix.evaluation import measure_speed

    record = measure_speed(
        None if mitigation is None else checked_choices(mitigation), documents=documents, tokens=tokens,
        repeats=repeats, new_tokens=new_tokens, together=together, warm=warm, redis_url=redis_url,
        settings=settings_from(model=model, adapter=adapter, device=device), out=output, progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show(record.to_json())


def _show(summary: dict[str, Any]) -> None:

    stock = summary["unmodified"]
    console = out()
    console.print(
        f"{summary['model']}, {summary['dtype']} on {summary['device']}: {summary['documents']} passages of "
        f"{summary['tokens_per_document']} tokens, {summary['prompt_tokens']} in all\n"
        f"unmodified: {stock['ttft_s']:.3f} s to the first token, {stock['decode_tokens_per_s']:.1f} tokens/s, "
        f"{_megabytes(stock['peak_memory_bytes'])} at most",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    given = {key for found in summary["methods"].values() for key in found}
    columns = {key: title for key, title in _COLUMNS.items() if key in given}
    shown = table("method", *(f"{title} x" for title in columns.values()))
    for name, found in summary["methods"].items():
        shown.add_row(name, *("-" if found.get(key) is None else f"{found[key]:.2f}" for key in columns))
    console.print(shown)
    console.print(
        "x: method / unmodified; lower is better, for tokens/s higher. cold, warm, disk, Redis: time to first token "
        "without cached passages, and with passages cached in memory, on disk, in Redis",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if "together_ratio" in given:
        console.print("together: tokens/s of all concurrent requests / of one request", highlight=False)
    for name, reason in summary["refused"].items():
        console.print(f"refused: {name}: {reason}", highlight=False, soft_wrap=True)
    if "record" in summary:
        console.print(f"record: {summary['record']}", highlight=False, soft_wrap=True)


def _megabytes(count: int | None) -> str:
    return "unknown memory" if count is None else f"{count / 1e6:.0f} MB"
