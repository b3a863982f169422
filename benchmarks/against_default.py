"""The default method against the others of kept records, paired by question.

python -m benchmarks.against_default [--default ARRANGEMENT] OUT.json "NAME=RECORD,RECORD" ...

``--default`` is the default of the records' model where it is not that of small models. Each NAME is a data set, each
RECORD the name of a position experiment in benchmarks/results. The scores of a question are means over its gold
positions. A question of two data sets, as of ten and of twenty passages, is resampled with both and counted once.
Records of several models or versions of the prompt are refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.keep_record import RESULTS
from benchmarks.tables import DEFAULT, filled
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import ExperimentRecord, read_record, save_record
from rag_posfix.evaluation.statistics import difference_interval, mean, mean_if_known

Scores = dict[tuple[str, int], tuple[float, float | None]]
"""(accuracy, log-probability) by (question, number of the record)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The default's scores minus those of a method, for a question of a record."""

    question: str
    accuracy: float
    log_probability: float | None

    @classmethod
    def of(cls, question: str, own: tuple[float, float | None], other: tuple[float, float | None]) -> Difference:
        """Return the difference of two (accuracy, log-probability)."""
        log_probability = None if own[1] is None or other[1] is None else own[1] - other[1]
        return cls(question, own[0] - other[0], log_probability)

    @classmethod
    def mean_of(cls, differences: Sequence[Difference]) -> Difference:
        """Return the mean of the differences of one question, of each record that has both methods."""
        return cls(
            differences[0].question,
            mean([difference.accuracy for difference in differences]),
            mean_if_known([difference.log_probability for difference in differences]),
        )


def scores_by_question(records: Sequence[ExperimentRecord]) -> dict[str, Scores]:
    """Return the scores of each method; a question is named by its data file and its name there."""
    cells: dict[str, dict[tuple[str, int], list[tuple[float, float | None]]]] = {}
    for number, record in enumerate(records):
        file = record.head["data"]["sha256"]
        for row in record.rows:
            if row["gold_position"] is not None:
                questions = cells.setdefault(row["condition"], {})
                scores = (float(row["accuracy"]), row["log_probability"])
                questions.setdefault((f"{file} {row['question']}", number), []).append(scores)
    return {
        method: {
            key: (mean([accuracy for accuracy, _ in scores]), mean_if_known([value for _, value in scores]))
            for key, scores in questions.items()
        }
        for method, questions in cells.items()
    }


def compare(sets: Mapping[str, Sequence[ExperimentRecord]], default: str = DEFAULT) -> dict[str, Any]:
    """Return for each method and data set, and over all, the default's accuracy minus the method's, with intervals.

    Raises:
        EvaluationError: The records are of several models or prompts, or a method shares no question with the default.
    """
    # By the fingerprint: a file and a folder with the same weights have different names.
    for several, name in (("models", "model_fingerprint"), ("dtypes", "dtype"), ("prompt versions", "prompt_version")):
        if len({str(record.head.get(name)) for records in sets.values() for record in records}) != 1:
            raise EvaluationError(f"the records are of several {several}; give those of one")
    differences: dict[str, dict[str, list[Difference]]] = {}
    for name, records in sets.items():
        scores = scores_by_question(records)
        own = scores.pop(default, {})
        for method, others in scores.items():
            by_question: dict[str, list[Difference]] = {}
            for (question, number), other in others.items():
                if (question, number) in own:
                    difference = Difference.of(question, own[question, number], other)
                    by_question.setdefault(question, []).append(difference)
            if not by_question:
                raise EvaluationError(
                    f"{name}: {method} has no question in a record with {default}; give records that hold both"
                )
            found = [Difference.mean_of(same) for same in by_question.values()]
            differences.setdefault(method, {})[name] = found
    return {
        method: {
            **{name: _summary(found) for name, found in by_set.items()},
            "all": _summary([difference for found in by_set.values() for difference in found]),
        }
        for method, by_set in differences.items()
    }


def _summary(differences: Sequence[Difference]) -> dict[str, Any]:
    accuracy = [difference.accuracy for difference in differences]
    questions = [difference.question for difference in differences]
    return {
        "n": len(set(questions)),
        "accuracy": mean(accuracy),
        "ci95": difference_interval(accuracy, questions),
        "log_probability": mean_if_known([difference.log_probability for difference in differences]),
    }


def table_of(summary: Mapping[str, Mapping[str, Any]], names: Collection[str]) -> dict[str, Any]:
    """Return the table: of each method in all data sets, the default's accuracy minus its own, by set and over all."""
    columns = {"default minus": "`{method}`"}
    columns |= {name: f"{{sets[{number}][accuracy]:+.2f}}" for number, name in enumerate(names)}
    columns |= {
        "all": "{all[accuracy]:+.3f} [{all[ci95][0]:+.3f}, {all[ci95][1]:+.3f}]", "questions": "{all[n]}",
        "log-probability, all": "{all[log_probability]:+.2f}",
    }  # fmt: skip
    rows = (
        {"method": method, "sets": [sets[name] for name in names], "all": sets["all"]}
        for method, sets in summary.items()
        if set(names) <= sets.keys()
    )
    return filled(columns, rows)


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
    summary = compare(sets, options.default)
    save_record(options.out, {**head, "summary": summary, "tables": {"against-default": table_of(summary, names)}})


if __name__ == "__main__":
    main(sys.argv[1:])
