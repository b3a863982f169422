"""``rag-posfix bench``: what each method costs, next to the unmodified model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, ModelName, checked_choices, settings_from
from rag_posfix.cli.output import emit_json, out, progress_bar, status

if TYPE_CHECKING:
    from rag_posfix.caching.kv.store import PassageStore
    from rag_posfix.generation.engine import Engine
    from rag_posfix.plan.layout import Layout

__all__ = ["bench"]

_BENCH_BYTES = 8 * 1024**3
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
    documents: Annotated[int, typer.Option("--documents", min=1, help="Passages in the prompt.")] = 20,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of each passage.")] = 150,
    mitigation: Annotated[str | None, typer.Option("--mitigation", help="Names, comma-separated; else all.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds; ratios are medians over them.")] = 3,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Decode steps per round.")] = 16,
    together: Annotated[
        int, typer.Option("--together", min=0, help="Requests that decode together in a further reading; 0: none.")
    ] = 0,
    warm: Annotated[
        bool, typer.Option("--warm/--no-warm", help="Also read the first token from passages that were kept.")
    ] = True,
    redis_url: Annotated[
        str | None, typer.Option("--redis-url", help="Also keep passages in this Redis; what it holds stays.")
    ] = None,
    model: ModelName = None,
    output: Annotated[Path | None, typer.Option("--out", help="Folder for a result record.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time to first token, tokens per second and memory of each method, as ratios to the unmodified model."""
    choices = None if mitigation is None else checked_choices(mitigation)
    settings = settings_from(model=model)
    with status("loading the model"):
        from rag_posfix.contracts.request import MitigationChoice
        from rag_posfix.evaluation.record import write_record
        from rag_posfix.evaluation.speed.bench import bench_record, measure, summarize_speed
        from rag_posfix.evaluation.speed.prompt import bench_layout
        from rag_posfix.generation.load import load_engine
        from rag_posfix.mitigations import MITIGATIONS

        engine = load_engine(
            settings.model, dtype=settings.dtype, device=settings.device, cache_dir=settings.cache_dir
        )
    layout = bench_layout(engine.encoder, documents, tokens)
    if choices is None:
        choices = [MitigationChoice(name) for name in MITIGATIONS.names()]
    with _stores(warm, redis_url) as stores, progress_bar("measuring") as progress:
        found = measure(
            engine, layout, choices, repeats=repeats, new_tokens=new_tokens, stores=stores, together=together,
            progress=progress,
        )  # fmt: skip
    summary = {**summarize_speed(found), **_prompt(engine, layout, documents, tokens)}
    if output is not None:
        used = {
            "documents": documents,
            "tokens": tokens,
            "repeats": repeats,
            "new_tokens": new_tokens,
            "together": together,
        }
        summary["record"] = str(write_record(output, "bench", bench_record(engine, found, summary, used)))
    if as_json:
        emit_json(summary)
    else:
        _show(summary)


def _prompt(engine: Engine, layout: Layout, documents: int, tokens: int) -> dict[str, Any]:
    return {
        "model": engine.model_id,
        "device": str(engine.loaded.device),
        "dtype": str(engine.loaded.model.dtype).removeprefix("torch."),
        "documents": documents,
        "tokens_per_document": tokens,
        "prompt_tokens": len(layout.token_ids),
    }


@contextmanager
def _stores(warm: bool, redis_url: str | None) -> Iterator[dict[str, PassageStore]]:
    """Hold one passage store per tier, each alone, so that each is what is measured."""
    from rag_posfix.caching.kv.disk import DiskPassages
    from rag_posfix.caching.kv.memory import MemoryPassages
    from rag_posfix.caching.kv.redis import RedisPassages
    from rag_posfix.caching.kv.store import PassageStore

    stores: dict[str, PassageStore] = {}
    with TemporaryDirectory(prefix="rag-posfix-bench-") as folder:
        if warm:
            stores["memory"] = PassageStore([MemoryPassages(_BENCH_BYTES)])
            stores["disk"] = PassageStore(
                [DiskPassages(Path(folder), max_bytes=_BENCH_BYTES)], queue_bytes=_BENCH_BYTES
            )
        if redis_url is not None:
            tier = RedisPassages(redis_url, timeout_seconds=5.0, max_bytes=_BENCH_BYTES)
            stores["redis"] = PassageStore([tier], queue_bytes=_BENCH_BYTES)
        try:
            yield stores
        finally:
            for store in stores.values():
                store.close()


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
    given = {key for found in summary["methods"].values() for key in found}
    columns = {key: title for key, title in _COLUMNS.items() if key in given}
    table = Table(Column("method", no_wrap=True), *(f"{title} x" for title in columns.values()))
    for name, found in summary["methods"].items():
        table.add_row(name, *("-" if found.get(key) is None else f"{found[key]:.2f}" for key in columns))
    console.print(table)
    console.print(
        "x: method / unmodified; lower is better, for tokens/s higher. cold, warm, disk, Redis: time to the first "
        "token with nothing kept, and from passages kept in memory, on disk, in Redis",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if "together_ratio" in given:
        console.print("together: tokens/s of all requests / of one alone", highlight=False)
    for name, reason in summary["refused"].items():
        console.print(f"refused: {name}: {reason}", highlight=False, soft_wrap=True)
    if "record" in summary:
        console.print(f"record: {summary['record']}", highlight=False, soft_wrap=True)


def _megabytes(count: int | None) -> str:
    return "unknown memory" if count is None else f"{count / 1e6:.0f} MB"
