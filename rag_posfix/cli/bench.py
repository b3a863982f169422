"""``rag-posfix bench``: time and memory of each method, relative to the unmodified model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, checked_choices, out_option, with_settings
from rag_posfix.cli.output import emit, experiment_step, out, say, table
from rag_posfix.settings import Settings

_COLUMNS = {
    "ttft_cold_ratio": "cold",
    "ttft_warm_memory_ratio": "warm",
    "ttft_warm_disk_ratio": "disk",
    "ttft_warm_redis_ratio": "Redis",
    "decode_ratio": "tokens/s",
    "together_ratio": "concurrent",
    "memory_ratio": "memory",
    "memory_extra_ratio": "added",
}


@with_settings("model", "adapter", "device")
def bench(
    settings: Settings,
    documents: Annotated[
        int, typer.Option("--documents", min=1, help="Put this number of passages into the prompt.")
    ] = 20,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Make passages of this number of tokens.")] = 150,
    mitigation: Annotated[
        str | None, typer.Option("--mitigation", help="Measure these methods, comma-separated.", show_default="all")
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Run this number of rounds; ratios are medians.")
    ] = 3,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=1, help="Decode this number of tokens per round.")
    ] = 16,
    concurrent: Annotated[
        int, typer.Option("--concurrent", min=0, help="Also measure this number of requests at once; 0: none.")
    ] = 0,
    warm: Annotated[bool, typer.Option("--warm/--no-warm", help="Also measure with cached passages.")] = True,
    redis_url: Annotated[
        str | None,
        typer.Option(
            "--redis-url",
            help="Also measure passages in this Redis; nothing is deleted.",
            show_default="no Redis tier",
        ),
    ] = None,
    output: Annotated[Path | None, out_option("Write a result record here.", show_default="no record")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed and memory of methods against the baseline.

    Time to first token, tokens per second and memory of each method are ratios to the unmodified model.
    """
    choices = None if mitigation is None else checked_choices(mitigation)
    from rag_posfix.evaluation import measure_speed

    record = measure_speed(
        choices, documents=documents, tokens=tokens,
        repeats=repeats, new_tokens=new_tokens, together=concurrent, warm=warm, redis_url=redis_url,
        settings=settings, out=output, progress=experiment_step,
    )  # fmt: skip
    emit(record.to_json(), as_json, _show)


def _show(summary: dict[str, Any]) -> None:
    unmodified = summary["unmodified"]
    say(
        f"{summary['model']}, {summary['dtype']} on {summary['device']}: {summary['documents']} passages of "
        f"{summary['tokens_per_document']} tokens, {summary['prompt_tokens']} in all",
        f"unmodified: {unmodified['ttft_s']:.3f} s to the first token, {unmodified['decode_tokens_per_s']:.1f} "
        f"tokens/s, {_megabytes(unmodified['peak_memory_bytes'])} at most",
    )
    measured = {key for ratios in summary["methods"].values() for key in ratios}
    columns = {key: title for key, title in _COLUMNS.items() if key in measured}
    rows = table("method", *(f"{title} x" for title in columns.values()))
    for name, ratios in summary["methods"].items():
        rows.add_row(name, *("-" if ratios.get(key) is None else f"{ratios[key]:.2f}" for key in columns))
    out().print(rows)
    say(
        "x: method / unmodified; lower is better, for tokens/s higher. cold, warm, disk, Redis: time to first token "
        "without cached passages, and with passages cached in memory, on disk, in Redis"
    )
    if "together_ratio" in measured:
        say("concurrent: tokens/s of all concurrent requests / of one request")
    say(*(f"not supported: {name}: {reason}" for name, reason in summary["refused"].items()))
    if "record" in summary:
        say(f"record: {summary['record']}")


def _megabytes(count: int | None) -> str:
    return "unknown memory" if count is None else f"{count / 1e6:.0f} MB"
