"""``rag-posfix eval``: measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rag_posfix.cli.options import AsJson, ModelName, checked_choices, settings_from
from rag_posfix.cli.output import emit_json, out, progress_bar, status
from rag_posfix.cli.rerank import rerank
from rag_posfix.cli.rerank_positions import rerank_positions
from rag_posfix.errors import ConfigError

__all__ = ["app", "permutations", "positions"]

if TYPE_CHECKING:
    from rag_posfix.contracts.generator import Reranker
    from rag_posfix.contracts.request import MitigationChoice
    from rag_posfix.generation.engine import Engine
    from rag_posfix.settings import Settings

T = TypeVar("T")

Data = Annotated[
    Path,
    typer.Option("--data", help="Lost-in-the-Middle rows, or a file in SQuAD's form such as XQuAD; .gz or plain."),
]
Mitigations = Annotated[
    str, typer.Option("--mitigation", help="Names, comma-separated; name:parameter=value, values in JSON.")
]
Documents = Annotated[int, typer.Option("--documents", min=1, help="Passages per prompt.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Questions at most.")]
Skip = Annotated[int, typer.Option("--skip", min=0, help="Questions to leave out at the start.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="New tokens per answer.")]

_REUSE_GIB = 4
"""Bound of what a sweep keeps of prompts that it reads again at other places or under other methods."""

app = typer.Typer(help="Measure how much answers depend on the order of the passages.", no_args_is_help=True)
app.command("rerank")(rerank)
app.command("rerank-positions")(rerank_positions)


@app.callback()
def group() -> None:
    """Measure how much answers depend on the order of the passages."""


@app.command()
def positions(
    data: Data,
    output: Annotated[Path, typer.Option("--out", help="Folder for the result record and the journal of answers.")],
    mitigation: Mitigations = "none,context_experts",
    gold_positions: Annotated[str, typer.Option("--gold-positions", help="Places, from 0.")] = "0,4,9",
    documents: Documents = 10,
    limit: Limit = None,
    skip: Skip = 0,
    max_tokens: MaxTokens = 24,
    check_orders: Annotated[
        bool,
        typer.Option("--check-orders", help="Measure methods that ignore the order at every place, not at one."),
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Compute anew what the journal holds.")] = False,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse/--no-reuse",
            help=f"Keep what was read of passages in memory ({_REUSE_GIB} GiB) for the next condition: faster; "
            "seconds are then those of a warm store.",
        ),
    ] = False,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Put the gold passage at each place and compare methods: accuracy, log-probability, worst place and spread.

    Each answer goes to OUT/positions-journal.jsonl as soon as it is known. The same command, or one that asks for more
    questions, places or methods, then computes only what is missing; rows taken from the journal are marked "reused".
    The journal knows weights, method, prompt, question and passages, not the version of this program: after a change
    to a method's code use --fresh. A method that ignores the order of the passages is measured once per question and
    the row repeated for the other places, marked too; --check-orders measures it at each.
    """
    from rag_posfix.evaluation.data.datasets import load_examples

    examples = load_examples(data, limit=limit, skip=skip)
    choices = checked_choices(mitigation)
    places = _split(gold_positions, int, "--gold-positions")
    for example in examples:  # before the model: too few distractors are told at once
        for place in places:
            example.documents(documents, place)
    settings = settings_from(model=model)
    engine, reranker = _load(settings, choices)
    from rag_posfix.evaluation.answers.answer_journal import Journal
    from rag_posfix.evaluation.answers.positions import sweep_positions
    from rag_posfix.evaluation.answers.positions_summary import summarize

    if reuse:
        from rag_posfix.caching.kv.memory import MemoryPassages
        from rag_posfix.caching.kv.store import PassageStore

        engine = engine.with_passages(PassageStore([MemoryPassages(_REUSE_GIB * 1024**3)]))
    journal = Journal(output / "positions-journal.jsonl", fresh=fresh)
    with progress_bar("answering") as progress:
        outcomes = sweep_positions(
            engine, examples, choices, gold_positions=places, n_documents=documents, reranker=reranker,
            max_new_tokens=max_tokens, progress=progress, journal=journal, check_orders=check_orders,
        )  # fmt: skip
    summary = summarize(outcomes)
    used = {
        "documents": documents, "gold_positions": places, "limit": limit, "skip": skip, "max_tokens": max_tokens,
        "relevance": settings.embedding_model, "decoding": "greedy", "check_orders": check_orders, "reuse": reuse,
        "answers_of_earlier_runs_by": journal.sources,
    }  # fmt: skip
    _finish("positions", engine, choices, data, outcomes, summary, used, output, as_json)


@app.command()
def permutations(
    data: Data,
    output: Annotated[Path, typer.Option("--out", help="Folder for the result record.")],
    mitigation: Mitigations = "none,context_experts",
    orders: Annotated[int, typer.Option("--orders", min=2, help="Orders per question, the given one included.")] = 4,
    documents: Documents = 10,
    limit: Limit = None,
    skip: Skip = 0,
    max_tokens: MaxTokens = 24,
    seed: Annotated[int, typer.Option("--seed", help="Draws the orders.")] = 0,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Shuffle the passages and count the answers that change: flip rate, first-token difference, accuracy.

    The first order is the given one, gold passage first; the others are drawn at random, the same for every method.
    Every order is computed, also by methods that ignore the order.
    """
    from rag_posfix.evaluation.answers.orders import drawn_orders
    from rag_posfix.evaluation.data.datasets import load_examples

    examples = load_examples(data, limit=limit, skip=skip)
    choices = checked_choices(mitigation)
    drawn_orders(documents, orders, seed, "")  # before the model: what cannot be done is told at once
    for example in examples:
        example.documents(documents, 0)
    settings = settings_from(model=model)
    engine, reranker = _load(settings, choices)
    from rag_posfix.evaluation.answers.permutations import summarize_orders, sweep_orders

    with progress_bar("answering") as progress:
        rows = sweep_orders(
            engine, examples, choices, n_orders=orders, n_documents=documents, reranker=reranker, seed=seed,
            max_new_tokens=max_tokens, progress=progress,
        )  # fmt: skip
    used = {
        "documents": documents, "orders": orders, "limit": limit, "skip": skip, "max_tokens": max_tokens, "seed": seed,
        "relevance": settings.embedding_model, "decoding": "greedy",
    }  # fmt: skip
    _finish("permutations", engine, choices, data, rows, summarize_orders(rows), used, output, as_json)


def _load(settings: Settings, choices: Sequence[MitigationChoice]) -> tuple[Engine, Reranker]:
    """Return the model, which takes every choice, and what scores the passages."""
    with status("loading the model and the embeddings"):
        from rag_posfix.generation.load import load_engine
        from rag_posfix.reranking.embedding import EmbeddingReranker
        from rag_posfix.retrieval.embeddings import SentenceEmbeddings

        engine = load_engine(
            settings.model, dtype=settings.dtype, device=settings.device, cache_dir=settings.cache_dir
        )
        reranker = EmbeddingReranker(embeddings=SentenceEmbeddings(settings.embedding_model))
    for choice in choices:
        engine.describe(choice)
    return engine, reranker


def _finish(
    kind: str,
    engine: Engine,
    choices: Sequence[MitigationChoice],
    data: Path,
    rows: Sequence[Any],
    summary: dict[str, Any],
    used: Mapping[str, Any],
    output: Path,
    as_json: bool,
) -> None:
    """Write the record and print the summary."""
    from rag_posfix.evaluation.record import run_record, write_record

    record = run_record(kind, engine, choices, data, [asdict(row) for row in rows], summary, used)
    summary["record"] = str(write_record(output, kind, record))
    if as_json:
        emit_json(summary)
    elif kind == "positions":
        _show_positions(summary)
    else:
        _show_permutations(summary)


def _split(text: str, kind: Callable[[str], T], option: str) -> list[T]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} must be numbers separated by commas, for example 0,4,9") from error


def _show_positions(summary: dict[str, Any]) -> None:
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
    console.print(
        f"{summary['n']} questions; {summary['reused']} answers were known already; record: {summary['record']}",
        highlight=False,
    )


def _show_permutations(summary: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("method", "answers that change", "questions with a change", "accuracy", "first token moves by up to")
    for name, found in summary["mitigations"].items():
        low, high = found["flip_rate_ci95"]
        table.add_row(
            name, f"{found['flip_rate']:.0%} ({low:.0%} to {high:.0%})", f"{found['any_flip']:.0%}",
            f"{found['accuracy']:.2f}", f"{found['max_logit_difference']:.4f}",
        )  # fmt: skip
    console = out()
    console.print(table)
    console.print(
        f"{summary['n']} questions in {summary['orders']} orders; a change is against the first order; "
        f"record: {summary['record']}", highlight=False,
    )  # fmt: skip
