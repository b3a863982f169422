"""The default method against the others of kept records, paired by question.

python -m benchmarks.against_default [--default ARRANGEMENT] OUT.json "NAME=RECORD,RECORD" ...

``--default`` is the default of the records' model where it is not that of small models. Each NAME is a data set, each
RECORD the name of a position experiment in benchmarks/results. A question counts once: its scores are means over the
gold positions. Records of several models are refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.keep_record import RESULTS
from benchmarks.tables import DEFAULT
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import ExperimentRecord, read_record, save_record
from rag_posfix.evaluation.statistics import difference_interval, mean

Scores = dict[tuple[int, str], tuple[float, float]]


def scores_by_question(records: Sequence[ExperimentRecord]) -> dict[str, Scores]:
    """Return for each method (accuracy, log-probability) by (number of the record, question)."""
    cells: dict[str, dict[tuple[int, str], list[tuple[float, float]]]] = {}
    for number, record in enumerate(records):
        for row in record.rows:
            if row["gold_position"] is not None:
                questions = cells.setdefault(row["condition"], {})
                scores = (float(row["accuracy"]), float(row["log_probability"]))
                questions.setdefault((number, str(row["question"])), []).append(scores)
    return {
        method: {
            key: (mean([accuracy for accuracy, _ in scores]), mean([value for _, value in scores]))
            for key, scores in questions.items()
        }
        for method, questions in cells.items()
    }


def compare(sets: Mapping[str, Sequence[ExperimentRecord]], default: str = DEFAULT) -> dict[str, Any]:
    """Return for each method and data set, and over all, the default's accuracy minus the method's, with intervals."""
    # By the fingerprint: a file and a folder with the same weights have different names.
    if len({str(record.head["model_fingerprint"]) for records in sets.values() for record in records}) != 1:
        raise EvaluationError("the records are of several models; give those of one")
    differences: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, records in sets.items():
        scores = scores_by_question(records)
        own = scores.pop(default)
        for method, others in scores.items():
            pairs = [(own[key], other) for key, other in others.items() if key in own]
            differences.setdefault(method, {})[name] = [(a[0] - b[0], a[1] - b[1]) for a, b in pairs]
    return {
        method: {
            **{name: _difference(values) for name, values in by_set.items()},
            "all": _difference([value for values in by_set.values() for value in values]),
        }
        for method, by_set in differences.items()
    }


def _difference(values: Sequence[tuple[float, float]]) -> dict[str, Any]:
    accuracy = [value for value, _ in values]
    return {
        "n": len(values),
        "accuracy": mean(accuracy),
        "ci95": difference_interval(accuracy),
        "log_probability": mean([value for _, value in values]),
    }


def main(arguments: Sequence[str]) -> None:
    """Write the record; each of its data sets names the records that it is of."""
    parser = argparse.ArgumentParser(prog="benchmarks.against_default")
    parser.add_argument("--default", default=DEFAULT)
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="+")
    options = parser.parse_args(arguments)
    names = {name: records.split(",") for name, _, records in (text.partition("=") for text in options.sets)}
    sets = {name: [read_record(RESULTS / f"{r}.json") for r in records] for name, records in names.items()}
    model = next(iter(sets.values()))[0].head["model"]
    head = {"kind": "against-default", "model": model, "records": names, "default": options.default}
    save_record(options.out, {**head, "summary": compare(sets, options.default)})


if __name__ == "__main__":
    main(sys.argv[1:])
