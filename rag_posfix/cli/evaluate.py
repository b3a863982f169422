"""``rag-posfix eval``: measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from rag_posfix.cli.options import AsJson, ModelName, checked_choices, settings_from
from rag_posfix.cli.output import emit_json, out, progress_bar, status
from rag_posfix.errors import ConfigError

__all__ = ["app", "positions"]

T = TypeVar("T")

app = typer.Typer(help="Measure how much answers depend on the order of the passages.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Measure how much answers depend on the order of the passages."""


@app.command()
def positions(
    data: Annotated[Path, typer.Option("--data", help="Lost-in-the-Middle rows, .jsonl or .jsonl.gz.")],
    output: Annotated[Path, typer.Option("--out", help="Folder for the result record.")],
    mitigation: Annotated[
        str, typer.Option("--mitigation", help="Names, comma-separated; name:parameter=value, values in JSON.")
    ] = "none,context_experts",
    gold_positions: Annotated[str, typer.Option("--gold-positions", help="Places, from 0.")] = "0,4,9",
    documents: Annotated[int, typer.Option("--documents", min=1, help="Passages per prompt.")] = 10,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Questions at most.")] = None,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Questions to leave out at the start.")] = 0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="New tokens per answer.")] = 24,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Put the gold passage at each place and compare methods: accuracy, log-probability, worst place and spread."""
    from rag_posfix.evaluation.datasets import load_examples

    examples = load_examples(data, limit=limit, skip=skip)
    choices = checked_choices(mitigation)
    places = _split(gold_positions, int, "--gold-positions")
    for example in examples:  # before the model: too few distractors are told at once
        for place in places:
            example.documents(documents, place)
    settings = settings_from(model=model)
    with status("loading the model and the embeddings"):
        from rag_posfix.evaluation.positions import position_record, summarize, sweep_positions
        from rag_posfix.evaluation.record import write_record
        from rag_posfix.generation.models import load_engine
        from rag_posfix.reranking.embedding import EmbeddingReranker
        from rag_posfix.retrieval.embeddings import SentenceEmbeddings

        engine = load_engine(
            settings.model, dtype=settings.dtype, device=settings.device, cache_dir=settings.cache_dir
        )
        reranker = EmbeddingReranker(embeddings=SentenceEmbeddings(settings.embedding_model))
    for choice in choices:
        engine.describe(choice)
    with progress_bar("answering") as progress:
        outcomes = sweep_positions(
            engine, examples, choices, gold_positions=places, n_documents=documents, reranker=reranker,
            max_new_tokens=max_tokens, progress=progress,
        )  # fmt: skip
    summary = summarize(outcomes)
    settings_used = {
        "documents": documents,
        "gold_positions": places,
        "limit": limit,
        "skip": skip,
        "max_tokens": max_tokens,
        "relevance": settings.embedding_model,
        "decoding": "greedy",
    }
    record = position_record(engine, choices, data, outcomes, summary, settings_used)
    summary["record"] = str(write_record(output, "positions", record))
    if as_json:
        emit_json(summary)
    else:
        _show(summary)


def _split(text: str, kind: Callable[[str], T], option: str) -> list[T]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} must be numbers separated by commas, for example 0,4,9") from error


def _show(summary: dict[str, Any]) -> None:
    from rich.table import Table

    mitigations = summary["mitigations"]
    places = list(next(iter(mitigations.values()))["positions"])
    table = Table("method", *(f"gold at {place}" for place in places), "worst", "spread", "answers that change")
    for name, found in mitigations.items():
        cells = [f"{p['log_probability']:.2f} ({p['accuracy']:.2f})" for p in found["positions"].values()]
        table.add_row(
            name, *cells, f"{found['worst_log_probability']:.2f} ({found['worst']:.2f})",
            f"{found['spread_log_probability']:.2f} ({found['spread']:.2f})", f"{found['answers_that_change']:.0%}",
        )  # fmt: skip
    console = out()
    console.print(table)
    console.print("log-probability of the answer per token (share of answers that hold it)", highlight=False)
    for name in ("closed_book", "gold_only"):
        found = summary[name]
        console.print(f"{name}: {found['log_probability']:.2f} ({found['accuracy']:.2f})", highlight=False)
    console.print(f"{summary['n']} questions; record: {summary['record']}", highlight=False)
