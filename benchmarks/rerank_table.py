"""Prints the Markdown table of reranking records: ``python -m benchmarks.rerank_table RECORD...``.

Takes records of ``eval rerank`` or of ``eval rerank-positions``: one kind, one data set, one number of
questions. A run that several hold is taken from the first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MEASURES = ("nDCG@10", "RR@10", "R@10", "P@1")
WORK = {"seconds_median": "seconds", "tokens_read": "tokens read", "forward_passes": "passes", "calls": "calls"}

Record = Mapping[str, Any]


def short(value: float) -> str:
    """Return a share without the zero before its point: .681."""
    return f"{value:.3f}".removeprefix("0")


def work(found: Record) -> list[str]:
    """Return what a query cost, a dash for what was not counted."""
    seconds = found.get("seconds_median", found["seconds"])
    spent = [found["tokens_read"], found["forward_passes"], found["calls"]]
    time = f"{seconds:.1f}" if seconds >= 0.1 else f"{seconds:.4f}"
    return [time, *("-" if value is None else f"{value:,.0f}" for value in spent)]


def ranking_rows(records: Sequence[Record]) -> Iterator[list[str]]:
    """Yield a row for the first stage and for each reranker, with its distance from the first stage."""
    first = {record["summary"]["first_stage"]["name"]: record["summary"]["first_stage"] for record in records}
    yield ["run", *MEASURES, "nDCG@10 - first stage, 95 %", *WORK.values()]
    yield ["---"] * (len(MEASURES) + len(WORK) + 2)
    for name, found in first.items():
        yield [f"first stage (`{name}`)", *(short(found[measure]) for measure in MEASURES), "-", *work(found)]
    runs: dict[str, tuple[Record, str]] = {}
    for record in records:
        for name, found in record["summary"]["runs"].items():
            runs.setdefault(name, (found, against_first(record, name)))
    for name, (found, versus) in runs.items():
        yield [f"`{name}`", *(short(found[measure]) for measure in MEASURES), versus, *work(found)]


def against_first(record: Record, name: str) -> str:
    """Return how far a run's nDCG@10 is from the first stage's."""
    for pair in record["summary"]["significance"]:
        if (pair["measure"], pair["a"], pair["b"]) == ("nDCG@10", name, "first_stage"):
            low, high = pair["ci95"]
            return f"{pair['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
    return "-"


def place_rows(records: Sequence[Record]) -> Iterator[list[str]]:
    """Yield a row for each reranker: recall of the gold passage at each place."""
    found: dict[str, Record] = {}
    for record in records:
        for name, summary in record["summary"]["rerankers"].items():
            found.setdefault(name, summary)
    places = list(next(iter(found.values()))["places"])
    heads = [f"recall@{cut}, gold at {place}" for cut in (1, 3) for place in places]
    yield ["reranker", *heads, "spread @1", "spread @3", "rankings that change", *WORK.values()]
    yield ["---"] * (len(heads) + len(WORK) + 4)
    for name, summary in found.items():
        recalls = [short(summary["places"][place][f"recall@{cut}"]) for cut in (1, 3) for place in places]
        spreads = [short(summary[f"recall@{cut}"]["spread"]) for cut in (1, 3)]
        changes = f"{summary['rankings_that_change']:.0%}".replace("%", " %")
        yield [f"`{name}`", *recalls, *spreads, changes, *work(summary)]


def rows_of(records: Sequence[Record]) -> Iterator[list[str]]:
    """Yield the rows of the table that fits the records."""
    if (
        len(
            {
                (record["kind"], json.dumps(record["data"], sort_keys=True), record["summary"]["n"])
                for record in records
            }
        )
        > 1
    ):
        raise SystemExit(
            "error: the records differ in kind, data or number of questions; give records of one evaluation"
        )
    yield from ranking_rows(records) if records[0]["kind"] == "rerank" else place_rows(records)


def main() -> None:
    """Print the table of the records that are named."""
    records = [json.loads(Path(path).read_text("utf-8")) for path in sys.argv[1:]]
    if not records:
        raise SystemExit("error: no record named; give paths of records, as in benchmarks/results/rerank-*.json")
    for row in rows_of(records):
        sys.stdout.write(f"| {' | '.join(row)} |\n")


if __name__ == "__main__":
    main()
