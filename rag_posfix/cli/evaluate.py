"""``rag-posfix eval``: measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, ModelName, checked_choices, parse_numbers, settings_from
from rag_posfix.cli.output import emit_json, experiment_step, out
from rag_posfix.cli.rerank import rerank, rerank_positions

__all__ = ["app", "permutations", "positions"]

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
    gold_positions: Annotated[
        str, typer.Option("--gold-positions", help="Where the gold passage stands, from 0.")
    ] = "0,4,9",
    documents: Documents = 10,
    limit: Limit = None,
    skip: Skip = 0,
    max_tokens: MaxTokens = 24,
    check_orders: Annotated[
        bool,
        typer.Option("--check-orders", help="Measure methods that ignore the order at every position, not at one."),
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Compute anew what the journal holds.")] = False,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse/--no-reuse",
            help="Keep what was read of passages in memory (4 GiB) for the next condition: faster; seconds are then "
            "those of a warm store.",
        ),
    ] = False,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Put the gold passage at each position and compare methods: accuracy, log-probability, worst position and spread.

    Each answer goes to OUT/positions-journal.jsonl as soon as it is known. The same command, or one that asks for more
    questions, positions or methods, then computes only what is missing; rows taken from the journal are marked
    "reused". The journal knows weights, method, prompt, question and passages, not the version of this program: after
    a change to a method's code use --fresh. A method that ignores the order of the passages is measured once per
    question and the row repeated for the other positions, marked too; --check-orders measures it at each.
    """
    from rag_posfix.evaluation import evaluate_positions

    record = evaluate_positions(
        data, checked_choices(mitigation), gold_positions=parse_numbers(gold_positions, "--gold-positions"),
        documents=documents, limit=limit, skip=skip, max_tokens=max_tokens, check_orders=check_orders, fresh=fresh,
        reuse=reuse, settings=settings_from(model=model), out=output, progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_positions(record.to_json())


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
    from rag_posfix.evaluation import evaluate_permutations

    record = evaluate_permutations(
        data, checked_choices(mitigation), orders=orders, documents=documents, limit=limit, skip=skip,
        max_tokens=max_tokens, seed=seed, settings=settings_from(model=model), out=output, progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_permutations(record.to_json())


def _show_positions(summary: dict[str, Any]) -> None:
    from rich.table import Table

    mitigations = summary["mitigations"]
    positions = list(next(iter(mitigations.values()))["positions"])
    table = Table(
        "method", *(f"gold at {position}" for position in positions), "worst", "spread", "answers that change"
    )
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
