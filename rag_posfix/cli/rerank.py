"""``rag-posfix eval rerank`` and ``eval rerank-positions``: rerankers on a test collection, and by gold position."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, ModelName, parse_numbers, settings_from
from rag_posfix.cli.output import emit_json, experiment_step, out
from rag_posfix.contracts.method_spec import parse_method, split_outside
from rag_posfix.errors import ConfigError

if TYPE_CHECKING:
    from rag_posfix.evaluation import RerankerChoice

__all__ = ["rerank", "rerank_positions"]

Rerankers = Annotated[
    str, typer.Option("--reranker", help="Names, comma-separated; name:parameter=value, values in JSON.")
]
EmbeddingModel = Annotated[str | None, typer.Option("--embedding-model", help="minilm, a model id, or a folder.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Compute anew what the journal holds.")]


def rerank(
    corpus: Annotated[
        Path,
        typer.Option("--corpus", help="A BEIR folder, or a file: JSON lines, tab-separated or TREC markup."),
    ],
    output: Annotated[Path, typer.Option("--out", help="Folder for runs, record, journal, index, plot and page.")],
    reranker: Rerankers = "",
    queries: Annotated[
        Path | None,
        typer.Option("--queries", help="JSON lines, tab-separated or TREC topics; default: the folder's."),
    ] = None,
    qrels: Annotated[
        Path | None, typer.Option("--qrels", help="TREC or BEIR judgements; default: the folder's qrels/test.tsv.")
    ] = None,
    first_stage: Annotated[
        str, typer.Option("--first-stage", help="bm25, dense, hybrid, with parameters; or the path of a TREC run.")
    ] = "bm25",
    depth: Annotated[int, typer.Option("--depth", min=1, help="Candidates per topic.")] = 20,
    measures: Annotated[
        str,
        typer.Option("--measures", help="Besides nDCG@10, RR@10, R@10 and P@1; names of ir-measures."),
    ] = "",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Judged topics at most.")] = None,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Judged topics to leave out at the start.")] = 0,
    split: Annotated[str, typer.Option("--split", help="Which qrels of a BEIR folder.")] = "test",
    binary: Annotated[bool, typer.Option("--binary", help="Count every grade above 0 as 1.")] = False,
    titles: Annotated[
        bool, typer.Option("--titles/--no-titles", help="Without, documents are their text alone.")
    ] = True,
    fresh: Fresh = False,
    ray: Annotated[bool, typer.Option("--ray", help="Rank on a Ray cluster: RAY_ADDRESS's, or a local one.")] = False,
    actors: Annotated[int, typer.Option("--ray-actors", min=1, help="Processes there that hold a reranker.")] = 2,
    embedding_model: EmbeddingModel = None,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Rerank a first stage's candidates with each reranker: TREC runs, nDCG@10 and others, significance, a page.

    Without --reranker the first stage alone is measured.

    Every ranking goes to OUT/rerank-journal.jsonl as soon as it is made. The same command, or one with more topics or
    rerankers, then computes only what is missing; anything that changes a ranking is part of the journal's key, except
    the version of this program: after a change to a reranker's code use --fresh.
    """
    from rag_posfix.evaluation import beir_files, evaluate_reranking

    run = Path(first_stage)
    record = evaluate_reranking(
        beir_files(corpus, queries, qrels, split), _reranker_choices(reranker),
        first_stage=run if run.is_file() else first_stage, depth=depth, measures=measures, limit=limit, skip=skip,
        binary=binary, titles=titles, fresh=fresh, ray=ray, ray_actors=actors,
        settings=settings_from(model=model, embedding_model=embedding_model), out=output, progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_runs(record.to_json())


def rerank_positions(
    data: Annotated[
        Path, typer.Option("--data", help="Lost-in-the-Middle rows, or a file in SQuAD's form; .gz or plain.")
    ],
    output: Annotated[Path, typer.Option("--out", help="Folder for the result record and the journal of rankings.")],
    reranker: Rerankers,
    gold_positions: Annotated[
        str, typer.Option("--gold-positions", help="Where the gold passage stands, from 0.")
    ] = "0,4,9",
    documents: Annotated[int, typer.Option("--documents", min=1, help="Passages per list.")] = 10,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Questions at most.")] = None,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Questions to leave out at the start.")] = 0,
    fresh: Fresh = False,
    embedding_model: EmbeddingModel = None,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Put the gold passage at each position of the list that a reranker is given: recall@1 and recall@3 per position.

    A scorer that does not look at the order gives the same numbers at every position. Every ranking goes to
    OUT/rerank-positions-journal.jsonl as soon as it is made, and the same command then computes only what is missing.
    """
    from rag_posfix.evaluation import evaluate_reranking_positions

    positions = parse_numbers(gold_positions, "--gold-positions")
    record = evaluate_reranking_positions(
        data, _reranker_choices(reranker, at_least=1), gold_positions=positions, documents=documents,
        limit=limit, skip=skip, fresh=fresh, settings=settings_from(model=model, embedding_model=embedding_model),
        out=output, progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_positions(record.to_json())


def _reranker_choices(text: str, at_least: int = 0) -> list[RerankerChoice]:
    """Read rerankers, separated by commas, each ``name`` or ``name:parameter=value``.

    Raises:
        ConfigError: too few, a parameter without a value, or a bracket or quote without its partner.
    """
    from rag_posfix.evaluation import RerankerChoice
    from rag_posfix.pipeline.file_parameters import with_file_parameters
    from rag_posfix.reranking import RERANKERS

    parts = split_outside(text, ",") if text.strip() else []
    if len(parts) < at_least:
        raise ConfigError("--reranker is empty; name at least one, for example embedding")
    specs = [with_file_parameters(parse_method(part, "reranker", "top_n=5"), RERANKERS) for part in parts]
    return [RerankerChoice(spec.name, spec.parameters) for spec in specs]


def _show_runs(result: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    first = result["first_stage"]
    measures = list(first["ci95"])
    table = Table("run", *measures, "seconds per query")
    for label, found in {first["name"]: first, **result["runs"]}.items():
        values = [f"{found[name]:.3f}" for name in measures]
        table.add_row(escape(label), *values, f"{found['seconds']:.3f}")
    console = out()
    console.print(table)
    for one in result["significance"]:
        if one["measure"] == measures[0]:
            low, high = one["ci95"]
            console.print(
                f"{one['a']} against {one['b']}: {one['measure']} {one['difference']:+.3f} ({low:+.3f} to "
                f"{high:+.3f}), p {one['p_holm']:.4f} after Holm's correction", highlight=False, markup=False,
            )  # fmt: skip
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in result["counts"].items() if count)
    console.print(f"{said}; page: {result['page']}; record: {result['record']}", highlight=False, markup=False)


def _show_positions(result: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    positions = list(next(iter(result["rerankers"].values()))["places"])
    table = Table("reranker", *(f"at {position}" for position in positions), "spread", "changed", "seconds")
    for label, found in result["rerankers"].items():
        cells = [f"{one['recall@1']:.2f} ({one['recall@3']:.2f})" for one in found["places"].values()]
        table.add_row(
            escape(label), *cells, f"{found['recall@1']['spread']:.2f} ({found['recall@3']['spread']:.2f})",
            f"{found['rankings_that_change']:.0%}", f"{found['seconds']:.3f}",
        )  # fmt: skip
    console = out()
    console.print(table)
    console.print(
        "gold passage at a position: share of questions that rank it first (among the first three); changed: share "
        "whose gold passage gets another rank from another position", highlight=False,
    )  # fmt: skip
    console.print(
        f"{result['n']} questions; {result['reused']} rankings were known already; record: {result['record']}",
        highlight=False, markup=False,
    )  # fmt: skip
