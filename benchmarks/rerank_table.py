"""Prints the Markdown table of reranking records: ``python -m benchmarks.rerank_table RECORD...``.

Takes records of ``eval rerank`` (seconds are medians per query) or of ``eval rerank-positions`` (means): one kind, one
data set, one number of questions. A run that several hold is taken from the first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import label

MEASURES = ("nDCG@10", "RR@10", "R@10", "P@1")
CUTS = (1, 3)
WORK = ("seconds", "tokens read", "passes", "calls")

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
    yield ["run", *MEASURES, "95 % of nDCG@10", "minus first stage", *WORK]
    yield ["---"] * (len(MEASURES) + len(WORK) + 3)
    for name, found in first.items():
        yield [f"first stage (`{name}`)", *measured(found), "-", *work(found)]
    runs: dict[str, tuple[Record, str]] = {}
    for record in records:
        for name, found in record["summary"]["runs"].items():
            runs.setdefault(name, (found, against_first(record, name)))
    for name, (found, versus) in runs.items():
        yield [label(name), *measured(found), versus, *work(found)]


def measured(found: Record) -> list[str]:
    """Return what a run reaches, and the interval of its nDCG@10."""
    return [*(short(found[name]) for name in MEASURES), f"[{', '.join(map(short, found['ci95']['nDCG@10']))}]"]


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
    yield ["reranker", *(f"recall@{cut}, gold at {' / '.join(places)}" for cut in CUTS), "rankings that change", *WORK]
    yield ["---"] * (len(CUTS) + len(WORK) + 2)
    for name, summary in found.items():
        recalls = [" / ".join(short(summary["places"][place][f"recall@{cut}"]) for place in places) for cut in CUTS]
        changes = f"{summary['rankings_that_change']:.0%}".replace("%", " %")
        yield [label(name), *recalls, changes, *work(summary)]


def rows_of(records: Sequence[Record]) -> Iterator[list[str]]:
    """Yield the rows of the table that fits the records."""
    kind = records[0]["kind"]
    if any(what(record) != what(records[0]) for record in records):
        raise SystemExit("error: records differ in kind, data or number of questions; give those of one evaluation")
    yield from ranking_rows(records) if kind == "rerank" else place_rows(records)


def what(record: Record) -> tuple[Any, ...]:
    """Return what was evaluated on what: the same in all records of a table."""
    return record["kind"], record["data"], record["summary"]["n"]


def main() -> None:
    """Print the table of the records that are named."""
    records = [json.loads(Path(path).read_text("utf-8")) for path in sys.argv[1:]]
    if not records:
        raise SystemExit("error: no record named; give paths of records, as in benchmarks/results/rerank-*.json")
    for row in rows_of(records):
        sys.stdout.write(f"| {' | '.join(row)} |\n")


if __name__ == "__main__":
    main()
