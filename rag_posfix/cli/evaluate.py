"""``rag-posfix eval``: how answers and rankings depend on the order of the passages.

``rag-posfix bench``: time and memory of each method, relative to the unmodified model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from rag_posfix.cli.options import (
    BASIC_METHODS,
    AsJson,
    Data,
    Documents,
    Fresh,
    GoldPositions,
    Hostile,
    Joined,
    Limit,
    RayActors,
    Skip,
    UseRay,
    checked_choices,
    checked_choices_and_arrangements,
    emit,
    experiment_step,
    gold_positions_of,
    out,
    out_option,
    say,
    say_figure,
    say_files,
    table,
    with_settings,
)
from rag_posfix.contracts.method_spec import read_reranker, split_outside
from rag_posfix.errors import ConfigError
from rag_posfix.settings import Settings

if TYPE_CHECKING:
    from rag_posfix.evaluation import RerankerChoice


Mitigations = Annotated[
    str | None,
    typer.Option(
        "--mitigation",
        help="Compare these methods, comma-separated.",
        show_default=f"{BASIC_METHODS}; none with --arrangement",
    ),
]
Arrangements = Annotated[
    str | None,
    typer.Option(
        "--arrangement",
        help="Compare reranker/order/method too, comma-separated.",
        show_default="no variant besides the methods",
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Stop answers after this number of tokens.")]
Rerankers = Annotated[str, typer.Option("--reranker", help="Compare these rerankers, comma-separated.")]

app = typer.Typer(help="Measure how answers depend on the passage order.", no_args_is_help=True)


@app.command()
@with_settings("model", "adapter", "device")
def positions(
    data: Data,
    output: Annotated[Path, out_option("Write the record and the journal of answers here.")],
    settings: Settings,
    mitigation: Mitigations = None,
    arrangement: Arrangements = None,
    gold_positions: GoldPositions = None,
    documents: Documents = 10,
    limit: Limit = None,
    skip: Skip = 0,
    hostile: Hostile = None,
    joined: Joined = None,
    baselines: Annotated[bool, typer.Option("--baselines", help="Add plain prompts, sorted by each scorer.")] = False,
    max_tokens: MaxTokens = 24,
    check_orders: Annotated[
        bool, typer.Option("--check-orders", help="Run order-invariant methods at every gold position.")
    ] = False,
    fresh: Fresh = False,
    reuse: Annotated[
        bool, typer.Option("--reuse/--no-reuse", help="Cache keys and values of passages (4 GiB); faster.")
    ] = False,
    ray: UseRay = False,
    actors: RayActors = 2,
    as_json: AsJson = False,
) -> None:
    """Compare answers by the position of the gold passage.

    Reads Lost-in-the-Middle or HotpotQA rows, or a file in SQuAD's format such as XQuAD. Measures accuracy,
    log-probability, worst position and spread. A variant is reranker/order/method, each as name:parameter=value,
    for example likelihood+embedding/reverse/none; an empty reranker is the embedding.

    The same command, or one with more questions, positions or methods, computes only what OUT/positions-journal.jsonl
    lacks. After a change to the code of a method, use --fresh. An order-invariant method runs once per question, and
    at every position with --check-orders.
    """
    choices = checked_choices_and_arrangements(mitigation, arrangement)
    from rag_posfix.evaluation import evaluate_positions

    record = evaluate_positions(
        data, choices,
        gold_positions=gold_positions_of(gold_positions, documents),
        documents=documents, limit=limit, skip=skip, hostile=hostile, joined=joined, baselines=baselines,
        max_tokens=max_tokens, check_orders=check_orders, fresh=fresh, reuse=reuse, ray=ray, ray_actors=actors,
        settings=settings, out=output, progress=experiment_step,
    )  # fmt: skip
    emit(record.to_json(), as_json, _show_positions)


@app.command()
@with_settings("model", "adapter", "device")
def permutations(
    data: Data,
    output: Annotated[Path, out_option("Write the result record here.")],
    settings: Settings,
    mitigation: Mitigations = None,
    arrangement: Arrangements = None,
    orders: Annotated[int, typer.Option("--orders", min=2, help="Try this number of orders, with the given one.")] = 4,
    documents: Documents = 10,
    limit: Limit = None,
    skip: Skip = 0,
    max_tokens: MaxTokens = 24,
    seed: Annotated[int, typer.Option("--seed", help="Draw the random orders from this seed.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Shuffle the passages and count the answers that change.

    Measures flip rate, difference of the first token and accuracy. The first order is the given one, with the gold
    passage first. The other orders are random and the same for every method. Order-invariant methods run with every
    order too.
    """
    choices = checked_choices_and_arrangements(mitigation, arrangement)
    from rag_posfix.evaluation import evaluate_permutations

    record = evaluate_permutations(
        data, choices, orders=orders, documents=documents,
        limit=limit, skip=skip, max_tokens=max_tokens, seed=seed, settings=settings, out=output,
        progress=experiment_step,
    )  # fmt: skip
    emit(record.to_json(), as_json, _show_permutations)


@app.command()
@with_settings("embedding_model", "model", "adapter", "device")
def rerank(
    corpus: Annotated[Path, typer.Option("--corpus", help="Rank documents of this BEIR folder or file.")],
    output: Annotated[Path, out_option("Write runs, record, journal, index and page here.")],
    settings: Settings,
    reranker: Rerankers = "",
    queries: Annotated[
        Path | None,
        typer.Option("--queries", help="Read queries from this file.", show_default="those of the BEIR folder"),
    ] = None,
    qrels: Annotated[
        Path | None,
        typer.Option(
            "--qrels", help="Read TREC or BEIR judgements here.", show_default="qrels/SPLIT.tsv of the BEIR folder"
        ),
    ] = None,
    first_stage: Annotated[
        str, typer.Option("--first-stage", help="Retrieve with bm25, dense, hybrid or a TREC run file.")
    ] = "bm25",
    depth: Annotated[int, typer.Option("--depth", min=1, help="Rerank this number of candidates per topic.")] = 20,
    measures: Annotated[
        str, typer.Option("--measures", help="Compute more ir-measures than the four standard ones.")
    ] = "",
    limit: Limit = None,
    skip: Skip = 0,
    split: Annotated[str, typer.Option("--split", help="Use qrels/SPLIT.tsv of a BEIR folder.")] = "test",
    binary: Annotated[bool, typer.Option("--binary", help="Count every grade above 0 as 1.")] = False,
    titles: Annotated[bool, typer.Option("--titles/--no-titles", help="Use the titles of documents.")] = True,
    fresh: Fresh = False,
    ray: UseRay = False,
    actors: RayActors = 2,
    as_json: AsJson = False,
) -> None:
    """Rerank candidates of a test collection, and measure.

    Writes TREC runs, measures (nDCG@10, RR@10, R@10, P@1 and those of --measures), significance tests and a page.
    Without --reranker only the first stage is measured. Corpus and queries are JSON lines, tab-separated or TREC.

    The same command, or one with more topics or rerankers, computes only what OUT/rerank-journal.jsonl lacks. After a
    change to the code of a reranker, use --fresh.
    """
    from rag_posfix.evaluation import beir_files, evaluate_reranking

    run = Path(first_stage)
    record = evaluate_reranking(
        beir_files(corpus, queries, qrels, split), _reranker_choices(reranker),
        first_stage=run if run.is_file() else first_stage, depth=depth, measures=measures, limit=limit, skip=skip,
        binary=binary, titles=titles, fresh=fresh, ray=ray, ray_actors=actors, settings=settings, out=output,
        progress=experiment_step,
    )  # fmt: skip
    emit(record.to_json(), as_json, _show_runs)


@app.command()
@with_settings("embedding_model", "model", "adapter", "device")
def rerank_positions(
    data: Data,
    output: Annotated[Path, out_option("Write the record and the journal of rankings here.")],
    reranker: Rerankers,
    settings: Settings,
    gold_positions: GoldPositions = None,
    documents: Documents = 10,
    limit: Limit = None,
    skip: Skip = 0,
    hostile: Hostile = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Compare recall by the input position of the gold passage.

    A reranker that does not depend on the input order has the same recall@1 and recall@3 at every position. Every
    ranking is appended to OUT/rerank-positions-journal.jsonl, and the same command computes only missing rankings.
    """
    from rag_posfix.evaluation import evaluate_reranking_positions

    record = evaluate_reranking_positions(
        data, _reranker_choices(reranker, at_least=1), gold_positions=gold_positions_of(gold_positions, documents),
        documents=documents, limit=limit, skip=skip, hostile=hostile, fresh=fresh, settings=settings, out=output,
        progress=experiment_step,
    )  # fmt: skip
    emit(record.to_json(), as_json, _show_rerank_positions)


def _reranker_choices(text: str, at_least: int = 0) -> list[RerankerChoice]:
    """Parse rerankers, separated by commas, each ``name`` or ``name:parameter=value``."""
    from rag_posfix.evaluation import RerankerChoice
    from rag_posfix.pipeline.file_parameters import with_file_parameters
    from rag_posfix.reranking import RERANKERS

    rerankers = split_outside(text, ",") if text.strip() else []
    if len(rerankers) < at_least:
        raise ConfigError("--reranker is empty; name at least one, for example embedding")
    specs = [with_file_parameters(read_reranker(reranker), RERANKERS) for reranker in rerankers]
    return [RerankerChoice(spec.name, spec.parameters) for spec in specs]


def _show_positions(summary: dict[str, Any]) -> None:
    mitigations = summary["mitigations"]
    gold_positions = list(next(iter(mitigations.values()))["positions"])
    headings = (f"gold at {position}" for position in gold_positions)
    rows = table("method", *headings, "worst", "spread", "answers that change")
    for name, scores in mitigations.items():
        cells = [f"{_number(p['log_probability'])} ({p['accuracy']:.2f})" for p in scores["positions"].values()]
        rows.add_row(
            name, *cells, f"{_number(scores['worst_log_probability'])} ({scores['worst']:.2f})",
            f"{_number(scores['spread_log_probability'])} ({scores['spread']:.2f})",
            f"{scores['answers_that_change']:.0%}",
        )  # fmt: skip
    out().print(rows)
    say("log-probability of the accepted answer per token (accuracy)")
    for name in ("closed_book", "gold_only"):
        say(f"{name}: {_number(summary[name]['log_probability'])} ({summary[name]['accuracy']:.2f})")
    say(f"{summary['n']} questions; {summary['reused']} answers reused; record: {summary['record']}")
    _show_verdict(summary, "positions")


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _show_verdict(summary: dict[str, Any], kind: str) -> None:
    say(*(f"{name} was not measured: {reason}" for name, reason in summary.get("not_measured", {}).items()))
    say(*summary["verdict"])
    _show_caption(summary, kind)
    say_files(summary, "png")


def _show_caption(summary: dict[str, Any], kind: str) -> None:
    from rag_posfix.evaluation.figures import CAPTIONS

    say_figure(summary, CAPTIONS[kind])


def _show_permutations(summary: dict[str, Any]) -> None:
    rows = table("method", "answers that change", "questions with a change", "accuracy", "max. logit difference")
    for name, scores in summary["mitigations"].items():
        low, high = scores["flip_rate_ci95"]
        rows.add_row(
            name, f"{scores['flip_rate']:.0%} ({low:.0%} to {high:.0%})", f"{scores['any_flip']:.0%}",
            f"{scores['accuracy']:.2f}", _number(scores["max_logit_difference"], 4),
        )  # fmt: skip
    out().print(rows)
    say(
        f"{summary['n']} questions in {summary['orders']} orders, each compared with the first order; "
        f"record: {summary['record']}"
    )
    _show_verdict(summary, "permutations")


def _show_runs(summary: dict[str, Any]) -> None:
    first = summary["first_stage"]
    measures = list(first["ci95"])
    rows = table("run", *measures, "seconds per query")
    for label, run in {first["name"]: first, **summary["runs"]}.items():
        rows.add_row(escape(label), *(f"{run[name]:.3f}" for name in measures), f"{run['seconds']:.3f}")
    out().print(rows)
    for test in summary["significance"]:
        if test["measure"] == measures[0]:
            low, high = test["ci95"]
            say(
                f"{test['a']} against {test['b']}: {test['measure']} {test['difference']:+.3f} ({low:+.3f} to "
                f"{high:+.3f}), p {test['p_holm']:.4f} after Holm's correction"
            )
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in summary["counts"].items() if count)
    _show_caption(summary, "rerank")
    say(f"{counts}; page: {summary['page']}; record: {summary['record']}")


def _show_rerank_positions(summary: dict[str, Any]) -> None:
    input_positions = list(next(iter(summary["rerankers"].values()))["places"])
    headings = (f"at {position}" for position in input_positions)
    hostile = any("hostile_first" in scores for scores in summary["rerankers"].values())
    rows = table("reranker", *headings, "spread", "changed", "seconds", *["hostile first"] * hostile)
    for label, scores in summary["rerankers"].items():
        cells = [f"{recall['recall@1']:.2f} ({recall['recall@3']:.2f})" for recall in scores["places"].values()]
        rows.add_row(
            escape(label), *cells, f"{scores['recall@1']['spread']:.2f} ({scores['recall@3']['spread']:.2f})",
            f"{scores['rankings_that_change']:.0%}", f"{scores['seconds']:.3f}",
            *([f"{scores['hostile_first']:.0%}"] if hostile else []),
        )  # fmt: skip
    out().print(rows)
    say(
        "cells: recall@1 (recall@3) of the gold passage by its input position; changed: share of questions in which "
        "the rank of the gold passage depends on its input position",
        f"{summary['n']} questions; {summary['reused']} rankings reused; record: {summary['record']}",
    )


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
