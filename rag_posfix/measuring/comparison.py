"""Two records side by side: what the second does better than the first beyond noise, by the questions of both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_posfix.evaluation.record import ExperimentRecord
from rag_posfix.evaluation.statistics import difference_interval, mean, randomisation_p

_CRITERIA = {
    "accuracy": "accuracy",
    "right": "right answers",
    "reciprocal_rank": "reciprocal rank",
    "changed": "answers that change",
}
"""The number of a row that is compared, the first one that both records have."""
_LOWER_IS_BETTER = "changed"
_SHOWN = {"closed_book": "no passages", "gold_only": "gold passage alone"}
_ARRANGEMENT, _QUESTION = ("condition", "arrangement", "label"), ("question", "id")

Values = Mapping[str, Mapping[str, float]]
"""Mean over the rows of a question, by arrangement and question."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What an arrangement does in both records, over the questions of both.

    Attributes:
        interval: 95 % interval of ``second - first``, questions resampled.
        p: Of the paired randomisation test.
        is_better: Whether the second record is better; None where the interval has 0 in it.
    """

    arrangement: str
    criterion: str
    first: float
    second: float
    interval: tuple[float, float]
    p: float
    n: int
    is_better: bool | None

    @property
    def sentence(self) -> str:
        """What is told of it."""
        low, high = self.interval
        name = _SHOWN.get(self.arrangement, self.arrangement)
        verdict = {True: "better", False: "worse", None: "no difference beyond noise"}[self.is_better]
        return (
            f"{name}: {verdict}, {self.criterion} {self.first:.2f} and {self.second:.2f} "
            f"({low:+.2f} to {high:+.2f}, p = {self.p:.3f}, {self.n} questions)"
        )


def compare_records(records: Sequence[ExperimentRecord]) -> list[Difference] | None:
    """Return the difference of each arrangement that two records have, in the order of the first; None unless two.

    Rows of one question (positions, orders) count as one mean, so that questions are what is resampled.
    """
    if len(records) != 2:
        return None
    field = next((name for name in _CRITERIA if all(_has(record, name) for record in records)), None)
    if field is None:
        return []
    left, right = (_values(record.rows, field) for record in records)
    differences = []
    for arrangement in left:
        common = [question for question in left[arrangement] if question in right.get(arrangement, {})]
        if common:
            pairs = [(left[arrangement][question], right[arrangement][question]) for question in common]
            differences.append(_difference(arrangement, field, pairs))
    return differences


def _difference(arrangement: str, field: str, pairs: Sequence[tuple[float, float]]) -> Difference:
    changes = [after - before for before, after in pairs]
    low, high = difference_interval(changes)
    is_better = None if low <= 0 <= high else (low > 0) != (field == _LOWER_IS_BETTER)
    first, second = (mean([pair[side] for pair in pairs]) for side in (0, 1))
    return Difference(
        arrangement, _CRITERIA[field], first, second, (low, high), randomisation_p(changes), len(pairs), is_better
    )


def _has(record: ExperimentRecord, field: str) -> bool:
    return any(field in row for row in record.rows)


def _values(rows: Sequence[Mapping[str, Any]], field: str) -> Values:
    """Return the values of a field; rows that ask in the same order again are no observations."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if isinstance(value := row.get(field), int | float) and row.get("kind") != "repeat":
            found[_name(row, _ARRANGEMENT)][_name(row, _QUESTION)].append(float(value))
    return {name: {question: mean(of) for question, of in asked.items()} for name, asked in found.items()}


def _name(row: Mapping[str, Any], fields: Sequence[str]) -> str:
    return next((str(row[name]) for name in fields if name in row), "")
