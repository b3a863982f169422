"""Puts a record into benchmarks/results under a name: ``python -m benchmarks.keep_record RECORD NAME``.

RECORD is the ``.json`` file that a command wrote with ``--out``, its rows beside it; or what ``rag-posfix demo
--json`` printed, which becomes a record of kind ``demo`` with a summary. The summary of a position experiment is made
anew from its rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rag_posfix.evaluation.answers.position_summary import PositionRow, summarize_positions
from rag_posfix.evaluation.record import read_head, read_record, save_record

RESULTS = Path(__file__).parent / "results"


def keep(source: Path, target: Path) -> None:
    """Write the record to the files of another name.

    Raises:
        EvaluationError: the record cannot be read, or its rows are not those of its head.
    """
    head = read_head(source)
    if isinstance(head.get("rows"), list):
        rows = head.pop("rows")
        save_record(target, {"kind": "demo", **head, "summary": summarize_demo(rows)}, rows)
        return
    record = read_record(source)
    if head.get("kind") == "positions":
        head = {**record.head, "summary": summarize_positions([position_row(row) for row in record.rows])}
        save_record(target, head, record.rows)
        return
    save_record(target, record.head, record.rows if "rows" in head else None)


def position_row(row: Mapping[str, Any]) -> PositionRow:
    """Return a row of a position experiment; the positions of several gold passages are a tuple again."""
    position = row["gold_position"]
    return PositionRow(**{**row, "gold_position": tuple(position) if isinstance(position, list) else position})


def summarize_demo(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return right answers and mean log-probability per method and gold position, and the answers that change."""
    methods: dict[str, Any] = {}
    for name in dict.fromkeys(row["mitigation"] for row in rows):
        own = [row for row in rows if row["mitigation"] == name]
        answers: dict[str, set[str]] = {}
        for row in own:
            answers.setdefault(row["question"], set()).add(row["answer"])
        methods[name] = {
            "positions": {
                gold: {
                    "right": sum(row["right"] for row in own if row["gold"] == gold),
                    "log_probability": fmean(row["log_probability"] for row in own if row["gold"] == gold),
                }
                for gold in dict.fromkeys(row["gold"] for row in own)
            },
            "answers_that_change": sum(len(found) > 1 for found in answers.values()),
        }
    return {"mitigations": methods, "n": len({row["question"] for row in rows})}


if __name__ == "__main__":
    keep(Path(sys.argv[1]), RESULTS / f"{sys.argv[2].removesuffix('.json')}.json")
