"""``rag-posfix eval``: how answers and rankings depend on the order of the passages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import (
    BASIC_METHODS,
    AdapterFolder,
    AsJson,
    DeviceName,
    GoldPositions,
    ModelName,
    checked_choices_and_arrangements,
    checked_output,
    gold_positions_of,
    settings_from,
)
from rag_posfix.cli.output import emit_json, experiment_step, out, table
from rag_posfix.cli.rerank import rerank, rerank_positions

Data = Annotated[
    Path,
    typer.Option(
        "--data", help="Lost-in-the-Middle or HotpotQA rows, or a file in SQuAD's format such as XQuAD; .gz or plain."
    ),
]
Mitigations = Annotated[
    str | None,
    typer.Option(
        "--mitigation",
        help="Methods, comma-separated; name:parameter=value, values in JSON.",
        show_default=f"{BASIC_METHODS}; none with --arrangement",
    ),
]
Arrangements = Annotated[
    str | None,
    typer.Option(
        "--arrangement",
        help="Reranker/order/method, comma-separated, each as name:parameter=value, for example "
        "likelihood+embedding/reverse/none. An empty reranker is the embedding.",
        show_default="no arrangement besides the methods",
    ),
]
Documents = Annotated[int, typer.Option("--documents", min=1, help="Number of passages per prompt.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Maximum number of questions.", show_default="all")]
Skip = Annotated[int, typer.Option("--skip", min=0, help="Number of questions to leave out at the start.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum number of tokens of an answer.")]

app = typer.Typer(help="Measure how much answers depend on the order of the passages.", no_args_is_help=True)
app.command("rerank")(rerank)
app.command("rerank-positions")(rerank_positions)


@app.callback()
def group() -> None:
    """Measure how much answers depend on the order of the passages."""


@app.command()
def positions(
    data: Data,
    output: Annotated[
        Path,
        typer.Option(
            "--out", callback=checked_output, help="Folder for the result record and the journal of answers."
        ),
    ],
    mitigation: Mitigations = None,
    arrangement: Arrangements = None,
    gold_positions: GoldPositions = None,
    documents: Documents = 10,
    limit: Limit = None,
    skip: Skip = 0,
    max_tokens: MaxTokens = 24,
    check_orders: Annotated[
        bool,
        typer.Option("--check-orders", help="Run order-free methods at every gold position, not only at one."),
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Recompute answers that are in the journal.")] = False,
    reuse: Annotated[
        bool,
        typer.Option(
            "--reuse/--no-reuse",
            help="Cache keys and values of passages in memory (4 GiB) for the next gold position. Faster, but seconds "
            "are then those of a warm cache.",
        ),
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Answer on the Ray cluster at RAY_ADDRESS, or on a local one.")
    ] = False,
    actors: Annotated[int, typer.Option("--ray-actors", min=1, help="Number of processes with the model on Ray.")] = 2,
    model: ModelName = None,
    adapter: AdapterFolder = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Put the gold passage at each position and compare: accuracy, log-probability, worst position and spread.

    Each answer is appended to OUT/positions-journal.jsonl. The same command, or one with more questions, positions or
    methods, computes only missing answers; rows from the journal are marked "reused". The key of an answer in the
    journal consists of weights, method, prompt, question and passages, not of the version of this program: after a
    change to the code of a method, use --fresh. An order-free method runs once per question, and its row is repeated
    for the other positions and marked "reused"; with --check-orders it runs at every position.
    """
    from rag_posfix.evaluation import evaluate_positions

    record = evaluate_positions(
        data, checked_choices_and_arrangements(mitigation, arrangement),
        gold_positions=gold_positions_of(gold_positions, documents),
        documents=documents, limit=limit, skip=skip, max_tokens=max_tokens, check_orders=check_orders, fresh=fresh,
        reuse=reuse, ray=ray, ray_actors=actors, settings=settings_from(model=model, adapter=adapter, device=device),
        out=output, progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_positions(record.to_json())


@app.command()
def permutations(
    data: Data,
    output: Annotated[
        Path,
        typer.Option("--out", callback=checked_output, help="Folder for the result record."),
    ],
    mitigation: Mitigations = None,
    arrangement: Arrangements = None,
    orders: Annotated[int, typer.Option("--orders", min=2, help="Orders per question, the given one included.")] = 4,
    documents: Documents = 10,
    limit: Limit = None,
    skip: Skip = 0,
    max_tokens: MaxTokens = 24,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random orders.")] = 0,
    model: ModelName = None,
    adapter: AdapterFolder = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Shuffle the passages and count the answers that change: flip rate, first-token difference, accuracy.

    The first order is the given one, with the gold passage first. The other orders are random and the same for every
    method. Order-free methods run with every order too.
    """
    from rag_posfix.evaluation import evaluate_permutations

    record = evaluate_permutations(
        data, checked_choices_and_arrangements(mitigation, arrangement), orders=orders, documents=documents,
        limit=limit, skip=skip, max_tokens=max_tokens, seed=seed,
        settings=settings_from(model=model, adapter=adapter, device=device), out=output, progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_permutations(record.to_json())


def _show_positions(summary: dict[str, Any]) -> None:

    mitigations = summary["mitigations"]
    positions = list(next(iter(mitigations.values()))["positions"])
    shown = table(
        "method", *(f"gold at {position}" for position in positions), "worst", "spread", "answers that change"
    )
    for name, found in mitigations.items():
        cells = [f"{_shown(p['log_probability'])} ({p['accuracy']:.2f})" for p in found["positions"].values()]
        shown.add_row(
            name, *cells, f"{_shown(found['worst_log_probability'])} ({found['worst']:.2f})",
            f"{_shown(found['spread_log_probability'])} ({found['spread']:.2f})",
            f"{found['answers_that_change']:.0%}",
        )  # fmt: skip
    console = out()
    console.print(shown)
    console.print("log-probability of the accepted answer per token (accuracy)", highlight=False)
    for name in ("closed_book", "gold_only"):
        found = summary[name]
        console.print(f"{name}: {_shown(found['log_probability'])} ({found['accuracy']:.2f})", highlight=False)
    console.print(
        f"{summary['n']} questions; {summary['reused']} answers reused; record: {summary['record']}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    _show_verdict(summary)


def _shown(value: float | None, digits: int = 2) -> str:
    """Return a number for a table; a dash for one that was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def _show_verdict(summary: dict[str, Any]) -> None:
    for name, reason in summary.get("not_measured", {}).items():
        out().print(f"{name} was not measured: {reason}", highlight=False, markup=False, soft_wrap=True)
    for sentence in summary["verdict"]:
        out().print(sentence, highlight=False, markup=False, soft_wrap=True)
    if "png" in summary:
        out().print(f"picture: {summary['png']}", highlight=False, markup=False, soft_wrap=True)


def _show_permutations(summary: dict[str, Any]) -> None:

    shown = table("method", "answers that change", "questions with a change", "accuracy", "max. logit difference")
    for name, found in summary["mitigations"].items():
        low, high = found["flip_rate_ci95"]
        shown.add_row(
            name, f"{found['flip_rate']:.0%} ({low:.0%} to {high:.0%})", f"{found['any_flip']:.0%}",
            f"{found['accuracy']:.2f}", _shown(found["max_logit_difference"], 4),
        )  # fmt: skip
    console = out()
    console.print(shown)
    console.print(
        f"{summary['n']} questions in {summary['orders']} orders, each compared with the first order; "
        f"record: {summary['record']}", highlight=False, soft_wrap=True,
    )  # fmt: skip
    _show_verdict(summary)
