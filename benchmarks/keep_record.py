"""Puts a record into benchmarks/results under a name: ``python -m benchmarks.keep_record RECORD [RECORD...] NAME``.

RECORD is the ``.json`` file that a command wrote with ``--out``, with its rows next to it; or the output of
``rag-posfix demo --json``, which becomes a record of kind ``demo`` with a summary. The summary of a position
experiment is computed again from its rows. Several records of one position experiment become one: each continues
where the one before ended (``--skip``, ``--limit``) and has the same model, data, methods and settings.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.experiment import PositionRow, summarize_positions
from rag_posfix.evaluation.record import ExperimentRecord, read_head, read_record, save_record

RESULTS = Path(__file__).parent / "results"
SAME = ("model_fingerprint", "dtype", "device", "data", "template", "prompt_version", "mitigations")
"""What records of one position experiment agree in, besides their settings."""
APART = ("skip", "limit", "answers_of_earlier_runs_by")
"""Settings in which the parts of one experiment differ."""


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


def join(sources: Sequence[Path], target: Path) -> None:
    """Write records of one position experiment, in the order of their questions, as one.

    The head is that of the last, with the version and commit of the others in ``answers_of_earlier_runs_by``.

    Raises:
        EvaluationError: a record is of another kind or experiment, or does not begin where the one before ended.
    """
    records = [read_record(source) for source in sources]
    first, *others = records
    end = _questions(first, sources[0]).stop
    for record, source in zip(others, sources[1:], strict=True):
        questions = _questions(record, source)
        here, expected = experiment(record.head, APART), experiment(first.head, APART)
        differing = sorted(name for name in {*here, *expected} if here.get(name) != expected.get(name))
        if differing:
            raise EvaluationError(f"{source} differs from {sources[0]} in {', '.join(differing)}; join equal runs")
        if questions.start != end:
            raise EvaluationError(f"{source} begins after {questions.start} questions, must after {end}; give --skip")
        end = questions.stop
    settings = records[-1].head["settings"]
    earlier = {f"{record.head['versions']['rag-posfix']} {record.head['git']}" for record in records[:-1]}
    used = earlier.union(*(record.head["settings"]["answers_of_earlier_runs_by"] for record in records))
    skip = first.head["settings"]["skip"]
    joined = {**settings, "skip": skip, "limit": end - skip, "answers_of_earlier_runs_by": sorted(used)}
    rows = [row for record in records for row in record.rows]
    summary = summarize_positions([position_row(row) for row in rows])
    save_record(target, {**records[-1].head, "settings": joined, "summary": summary}, rows)


def _questions(record: ExperimentRecord, source: Path) -> range:
    """Return the places in the data file of a record's questions."""
    if record.head.get("kind") != "positions":
        raise EvaluationError(f"{source} is of kind {record.head.get('kind')!r}, must be of a position experiment")
    skip = record.head["settings"]["skip"]
    return range(skip, skip + len({row["question"] for row in record.rows}))


def experiment(head: Mapping[str, Any], apart: Collection[str]) -> dict[str, Any]:
    """Return all in which records of one position experiment agree, but what ``apart`` names."""
    of_all = {**head["settings"], **{name: head.get(name) for name in SAME}}
    return {name: value for name, value in of_all.items() if name not in apart}


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
    *given, name = sys.argv[1:]
    written = RESULTS / f"{name.removesuffix('.json')}.json"
    if len(given) > 1:
        join([Path(record) for record in given], written)
    else:
        keep(Path(given[0]), written)
