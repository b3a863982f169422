"""``rag-posfix eval rerank``: rerankers on a BEIR or TREC collection."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, ModelName, settings_from
from rag_posfix.cli.output import emit_json, out, progress_bar
from rag_posfix.contracts.method_spec import parse_method, split_outside

if TYPE_CHECKING:
    from rag_posfix.evaluation.ranking.candidates import RerankerChoice

__all__ = ["rerank", "reranker_choices"]

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
    from rag_posfix.evaluation.data.beir import beir_files
    from rag_posfix.evaluation.ranking.run import RerankJob, run_rerank_job

    run = Path(first_stage) if Path(first_stage).is_file() else None
    stage = parse_method(first_stage, "first stage", "k1=1.2") if run is None else None
    job = RerankJob(
        files=beir_files(corpus, queries, qrels, split), rerankers=reranker_choices(reranker), out=output,
        first_stage=None if stage is None else stage.name,
        first_stage_parameters={} if stage is None else stage.parameters, run=run,
        depth=depth, measures=measures, limit=limit, skip=skip, binary=binary, titles=titles, fresh=fresh, ray=ray,
        actors=actors,
    )  # fmt: skip
    result = run_rerank_job(job, settings_from(model=model, embedding_model=embedding_model), progress_bar)
    if as_json:
        emit_json(result)
    else:
        _show(result)


def reranker_choices(text: str) -> list[RerankerChoice]:
    """Read several rerankers, separated by commas, each ``name`` or ``name:parameter=value``.

    Raises:
        ConfigError: a parameter without a value, or a bracket or quote without its partner.
    """
    from rag_posfix.evaluation.ranking.candidates import RerankerChoice
    from rag_posfix.pipeline.file_parameters import with_file_parameters
    from rag_posfix.reranking import RERANKERS

    parts = split_outside(text, ",") if text.strip() else []
    specs = [with_file_parameters(parse_method(part, "reranker", "top_n=5"), RERANKERS) for part in parts]
    return [RerankerChoice(spec.name, spec.parameters) for spec in specs]


def _show(result: dict[str, Any]) -> None:
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
