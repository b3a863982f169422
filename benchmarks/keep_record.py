"""Puts a record into benchmarks/results under a name: ``python -m benchmarks.keep_record RECORD NAME``.

RECORD is the ``.json`` file that a command wrote with ``--out``, with its rows next to it; or the output of
``rag-posfix demo --json``, which becomes a record of kind ``demo`` with a summary. The summary of a position
experiment is computed again from its rows.
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
    """Write the record to the files of another name."""
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
    """Return correct answers and mean log-probability per method and gold position, and the answers that change."""
    methods: dict[str, Any] = {}
    for name in dict.fromkeys(row["mitigation"] for row in rows):
        answers: dict[str, set[str]] = {}
        by_position: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            if row["mitigation"] == name:
                answers.setdefault(row["question"], set()).add(row["answer"])
                by_position.setdefault(row["gold"], []).append(row)
        methods[name] = {
            "positions": {
                gold: {
                    "right": sum(row["right"] for row in position),
                    "log_probability": fmean(row["log_probability"] for row in position),
                }
                for gold, position in by_position.items()
            },
            "answers_that_change": sum(len(texts) > 1 for texts in answers.values()),
        }
    return {"mitigations": methods, "n": len({row["question"] for row in rows})}


if __name__ == "__main__":
    keep(Path(sys.argv[1]), RESULTS / f"{sys.argv[2].removesuffix('.json')}.json")
