"""Prints the Markdown table of position records: ``python -m benchmarks.table RECORD...``.

Records of one data set and one number of questions may be given together; a method that several hold is taken from the
first.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROFILE = re.compile(r"profile=\[.*?\]")


def label(name: str) -> str:
    """Return a run's name without the numbers of a measured profile."""
    return f"`{PROFILE.sub('profile=PROFILE', name)}`"


def cell(log_probability: float, accuracy: float) -> str:
    """Return a log-probability and an accuracy: -3.21 (.20)."""
    return f"{log_probability:.2f} ({accuracy:.2f})".replace("(0.", "(.").replace("(1.00", "(1.0")


def row(name: str, found: Mapping[str, Any]) -> str:
    places = list(found["positions"].values())
    cells = [cell(place["log_probability"], place["accuracy"]) for place in places]
    if len(set(cells)) == 1 and found["answers_that_change"] == 0:
        cells = [cells[0], *["same"] * (len(cells) - 1)]
    spread = cell(found["spread_log_probability"], found["spread"])
    against = found.get("versus_none")
    if against is None:
        versus = "-"
    else:
        low, high = against["ci95"]
        versus = f"{against['worst_minus_best_log_probability']:+.2f} [{low:+.2f}, {high:+.2f}]"
    mean = cell(found["mean_log_probability"], found["mean"])
    worst = cell(found["worst_log_probability"], found["worst"])
    return f"| {label(name)} | {' | '.join(cells)} | {worst} | {mean} | {spread} | {versus} |"


def table(records: list[Mapping[str, Any]]) -> str:
    """Return the table, and the floor and the ceiling under it."""
    summaries = [record["summary"] for record in records]
    if len({(s["n"], *next(iter(s["mitigations"].values()))["positions"]) for s in summaries}) != 1:
        raise SystemExit("error: the records differ in questions or places; give records of one sweep")
    methods: dict[str, Any] = {}
    for summary in summaries:
        for name, found in summary["mitigations"].items():
            methods.setdefault(name, found)
    places = next(iter(methods.values()))["positions"]
    head = ["method", *(f"gold at {place}" for place in places), "worst", "mean", "spread", "worst - best of `none`"]
    lines = [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(row(name, found) for name, found in methods.items()),
    ]
    first = summaries[0]
    lines += ["", f"{first['n']} questions. The right passage alone: "
              f"{cell(first['gold_only']['log_probability'], first['gold_only']['accuracy'])}; no passages: "
              f"{cell(first['closed_book']['log_probability'], first['closed_book']['accuracy'])}."]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([json.loads(Path(path).read_text("utf-8")) for path in sys.argv[1:]]))
