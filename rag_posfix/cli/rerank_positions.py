"""``rag-posfix eval rerank-positions``: whether rerankers find the gold passage wherever it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, ModelName, settings_from
from rag_posfix.cli.output import emit_json, out, progress_bar
from rag_posfix.cli.rerank import EmbeddingModel, Fresh, Rerankers, reranker_choices
from rag_posfix.errors import ConfigError

if TYPE_CHECKING:
    from rag_posfix.evaluation.ranking.candidates import RerankerChoice

__all__ = ["rerank_positions"]


def rerank_positions(
    data: Annotated[
        Path, typer.Option("--data", help="Lost-in-the-Middle rows, or a file in SQuAD's form; .gz or plain.")
    ],
    output: Annotated[Path, typer.Option("--out", help="Folder for the result record and the journal of rankings.")],
    reranker: Rerankers,
    gold_positions: Annotated[str, typer.Option("--gold-positions", help="Places, from 0.")] = "0,4,9",
    documents: Annotated[int, typer.Option("--documents", min=1, help="Passages per list.")] = 10,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Questions at most.")] = None,
    skip: Annotated[int, typer.Option("--skip", min=0, help="Questions to leave out at the start.")] = 0,
    fresh: Fresh = False,
    embedding_model: EmbeddingModel = None,
    model: ModelName = None,
    as_json: AsJson = False,
) -> None:
    """Put the gold passage at each place of the list that a reranker is given: recall@1 and recall@3 per place.

    A scorer that does not look at the order gives the same numbers at every place. Every ranking goes to
    OUT/rerank-positions-journal.jsonl as soon as it is made, and the same command then computes only what is missing.
    """
    from rag_posfix.evaluation.data.datasets import load_examples
    from rag_posfix.evaluation.ranking.candidates import open_reranker, parts_of
    from rag_posfix.evaluation.ranking.gold_positions import rank_gold_places, summarize_gold_places
    from rag_posfix.evaluation.ranking.rankings import RankJournal
    from rag_posfix.evaluation.ranking.rerank import local_ranker

    choices, places = _checked(reranker), _places(gold_positions)
    examples = load_examples(data, limit=limit, skip=skip)
    for example in examples:  # before any model: too few distractors are told at once
        for place in places:
            example.documents(documents, place)
    settings = settings_from(model=model, embedding_model=embedding_model)
    journal = RankJournal(output / "rerank-positions-journal.jsonl", fresh=fresh)
    parts = parts_of(settings)
    rows = []
    for choice in choices:
        rows += rank_gold_places(
            local_ranker(open_reranker(choice, parts)), examples, gold_positions=places, n_documents=documents,
            journal=journal, progress=progress_bar,
        )  # fmt: skip
    used = {
        "documents": documents, "gold_positions": places, "limit": limit, "skip": skip, "model": settings.model,
        "embedding_model": settings.embedding_model, "dtype": settings.dtype, "device": settings.device,
        "rankings_of_earlier_runs_by": journal.sources,
    }  # fmt: skip
    summary = summarize_gold_places(rows)
    result = {**summary, "record": _record(output, data, choices, used, summary, [asdict(row) for row in rows])}
    if as_json:
        emit_json(result)
    else:
        _show(result, places)


def _checked(text: str) -> list[RerankerChoice]:
    from rag_posfix.evaluation.ranking.candidates import check_distinct, check_reranker

    choices = reranker_choices(text)
    if not choices:
        raise ConfigError("--reranker is empty; name at least one, for example embedding")
    check_distinct(choices)
    for choice in choices:
        check_reranker(choice)
    return choices


def _record(
    output: Path,
    data: Path,
    choices: Sequence[RerankerChoice],
    used: Mapping[str, Any],
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> str:
    """Write the record and return its path."""
    from rag_posfix.evaluation.record import environment, file_digest, write_record

    record = {
        "kind": "rerank-positions",
        **environment(),
        "data": {"name": data.name, "sha256": file_digest(data)},
        "rerankers": {choice.label: dict(choice.parameters) for choice in choices},
        "settings": used,
        "summary": summary,
        "rows": rows,
    }
    return str(write_record(output, "rerank-positions", record))


def _places(text: str) -> list[int]:
    try:
        places = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--gold-positions {text!r} must be numbers separated by commas, for example 0,4,9"
        ) from error
    if len(set(places)) < len(places):
        raise ConfigError(f"--gold-positions {text!r} names a place twice; once is all")
    return places


def _show(result: dict[str, Any], places: list[int]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("reranker", *(f"at {place}" for place in places), "spread", "changed", "seconds")
    for label, found in result["rerankers"].items():
        cells = [f"{one['recall@1']:.2f} ({one['recall@3']:.2f})" for one in found["places"].values()]
        table.add_row(
            escape(label), *cells, f"{found['recall@1']['spread']:.2f} ({found['recall@3']['spread']:.2f})",
            f"{found['rankings_that_change']:.0%}", f"{found['seconds']:.3f}",
        )  # fmt: skip
    console = out()
    console.print(table)
    console.print(
        "gold passage at a place: share of questions that rank it first (among the first three); changed: share whose "
        "gold passage ends elsewhere from another place", highlight=False,
    )  # fmt: skip
    console.print(
        f"{result['n']} questions; {result['reused']} rankings were known already; record: {result['record']}",
        highlight=False, markup=False,
    )  # fmt: skip
