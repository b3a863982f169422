"""``rag-posfix eval rerank`` and ``eval rerank-positions``: rerankers on a test collection, and by gold position."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import (
    AdapterFolder,
    AsJson,
    DeviceName,
    EmbeddingModel,
    GoldPositions,
    ModelName,
    checked_output,
    gold_positions_of,
    settings_from,
)
from rag_posfix.cli.output import emit_json, experiment_step, out, table
from rag_posfix.contracts.method_spec import split_outside
from rag_posfix.errors import ConfigError

if TYPE_CHECKING:
    from rag_posfix.evaluation import RerankerChoice

Rerankers = Annotated[
    str, typer.Option("--reranker", help="Rerankers, comma-separated: name, or name:parameter=value with JSON values.")
]
Queries = Annotated[
    Path | None,
    typer.Option(
        "--queries", help="JSON lines, tab-separated or TREC topics.", show_default="those of the BEIR folder"
    ),
]
Qrels = Annotated[
    Path | None,
    typer.Option("--qrels", help="TREC or BEIR judgements.", show_default="qrels/SPLIT.tsv of the BEIR folder"),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Recompute rankings that are in the journal.")]


def rerank(
    corpus: Annotated[
        Path,
        typer.Option("--corpus", help="A BEIR folder, or a file: JSON lines, tab-separated or TREC markup."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--out", callback=checked_output, help="Folder for runs, record, journal, index, figure and page."
        ),
    ],
    reranker: Rerankers = "",
    queries: Queries = None,
    qrels: Qrels = None,
    first_stage: Annotated[
        str, typer.Option("--first-stage", help="bm25, dense or hybrid, with parameters, or the path of a TREC run.")
    ] = "bm25",
    depth: Annotated[int, typer.Option("--depth", min=1, help="Number of candidates per topic.")] = 20,
    measures: Annotated[
        str,
        typer.Option("--measures", help="Further ir-measures, besides nDCG@10, RR@10, R@10 and P@1."),
    ] = "",
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Maximum number of judged topics.", show_default="all")
    ] = None,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Number of judged topics to leave out at the start.")] = 0,
    split: Annotated[str, typer.Option("--split", help="Split of a BEIR folder: qrels/SPLIT.tsv.")] = "test",
    binary: Annotated[bool, typer.Option("--binary", help="Count every grade above 0 as 1.")] = False,
    titles: Annotated[
        bool, typer.Option("--titles/--no-titles", help="Use the titles of documents, or their text only.")
    ] = True,
    fresh: Fresh = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Retrieve and rank on the Ray cluster at RAY_ADDRESS, or on a local one.")
    ] = False,
    actors: Annotated[int, typer.Option("--ray-actors", min=1, help="Number of processes of each stage on Ray.")] = 2,
    embedding_model: EmbeddingModel = None,
    model: ModelName = None,
    adapter: AdapterFolder = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Rerank the candidates of a first stage with each reranker: TREC runs, measures, significance tests, a page.

    Without --reranker only the first stage is measured.

    Every ranking is appended to OUT/rerank-journal.jsonl. The same command, or one with more topics or rerankers,
    computes only missing rankings. The key of a ranking in the journal does not include the version of this program:
    after a change to the code of a reranker, use --fresh.
    """
    from rag_posfix.evaluation import beir_files, evaluate_reranking

    run = Path(first_stage)
    record = evaluate_reranking(
        beir_files(corpus, queries, qrels, split), _reranker_choices(reranker),
        first_stage=run if run.is_file() else first_stage, depth=depth, measures=measures, limit=limit, skip=skip,
        binary=binary, titles=titles, fresh=fresh, ray=ray, ray_actors=actors,
        settings=settings_from(model=model, adapter=adapter, device=device, embedding_model=embedding_model),
        out=output, progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_runs(record.to_json())


def rerank_positions(
    data: Annotated[
        Path,
        typer.Option("--data", help="Lost-in-the-Middle or HotpotQA rows, or a file in SQuAD's format; .gz or plain."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--out", callback=checked_output, help="Folder for the result record and the journal of rankings."
        ),
    ],
    reranker: Rerankers,
    gold_positions: GoldPositions = None,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Number of passages per list.")] = 10,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Maximum number of questions.", show_default="all")
    ] = None,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Number of questions to leave out at the start.")] = 0,
    fresh: Fresh = False,
    embedding_model: EmbeddingModel = None,
    model: ModelName = None,
    adapter: AdapterFolder = None,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Put the gold passage at each position of a reranker's input: recall@1 and recall@3 per position.

    A reranker that does not depend on the input order has the same recall at every position. Every ranking is
    appended to OUT/rerank-positions-journal.jsonl, and the same command computes only missing rankings.
    """
    from rag_posfix.evaluation import evaluate_reranking_positions

    positions = gold_positions_of(gold_positions, documents)
    record = evaluate_reranking_positions(
        data, _reranker_choices(reranker, at_least=1), gold_positions=positions, documents=documents,
        limit=limit, skip=skip, fresh=fresh,
        settings=settings_from(model=model, adapter=adapter, device=device, embedding_model=embedding_model),
        out=output, progress=experiment_step,
    )  # fmt: skip
    if as_json:
        emit_json(record.to_json())
    else:
        _show_positions(record.to_json())


def _reranker_choices(text: str, at_least: int = 0) -> list[RerankerChoice]:
    """Parse rerankers, separated by commas, each ``name`` or ``name:parameter=value``.

    Raises:
        ConfigError: too few, a parameter without a value, or an unclosed bracket or quote.
    """
    from rag_posfix.contracts.method_spec import read_reranker
    from rag_posfix.evaluation import RerankerChoice
    from rag_posfix.pipeline.file_parameters import with_file_parameters
    from rag_posfix.reranking import RERANKERS

    parts = split_outside(text, ",") if text.strip() else []
    if len(parts) < at_least:
        raise ConfigError("--reranker is empty; name at least one, for example embedding")
    specs = [with_file_parameters(read_reranker(part), RERANKERS) for part in parts]
    return [RerankerChoice(spec.name, spec.parameters) for spec in specs]


def _show_runs(result: dict[str, Any]) -> None:
    from rich.markup import escape

    first = result["first_stage"]
    measures = list(first["ci95"])
    shown = table("run", *measures, "seconds per query")
    for label, found in {first["name"]: first, **result["runs"]}.items():
        values = [f"{found[name]:.3f}" for name in measures]
        shown.add_row(escape(label), *values, f"{found['seconds']:.3f}")
    console = out()
    console.print(shown)
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

    positions = list(next(iter(result["rerankers"].values()))["places"])
    shown = table("reranker", *(f"at {position}" for position in positions), "spread", "changed", "seconds")
    for label, found in result["rerankers"].items():
        cells = [f"{one['recall@1']:.2f} ({one['recall@3']:.2f})" for one in found["places"].values()]
        shown.add_row(
            escape(label), *cells, f"{found['recall@1']['spread']:.2f} ({found['recall@3']['spread']:.2f})",
            f"{found['rankings_that_change']:.0%}", f"{found['seconds']:.3f}",
        )  # fmt: skip
    console = out()
    console.print(shown)
    console.print(
        "cells: recall@1 (recall@3) of the gold passage by its input position; changed: share of questions in which "
        "the rank of the gold passage depends on its input position", highlight=False,
    )  # fmt: skip
    console.print(
        f"{result['n']} questions; {result['reused']} rankings reused; record: {result['record']}",
        highlight=False, markup=False,
    )  # fmt: skip
