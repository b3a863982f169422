"""What is asked of the run, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.bench import Row
from benchmarks.gpu.models import Scale


@dataclass(frozen=True)
class Ask:
    """One thing that is asked.

    Attributes:
        text: What is asked.
        value: What was found; None where it was not measured.
        passed: Whether that is enough; None where it was not measured.
    """

    text: str
    value: float | None
    passed: bool | None


def asks(found: Mapping[str, Sequence[Row]], scale: Scale) -> list[Ask]:
    """Return every ask with its value, for the model and the prompt that the asks are about."""
    exact, first = found.get("exactness", ()), found.get("first-token", ())
    labels = {"model": scale.model.name, "size": scale.asked.label}

    def of(method: str, name: str) -> float | None:
        return _value(first, {**labels, "method": method}, name)

    judged = [row for row in exact if "passed" in row or "failed" in row]
    right = None if not judged else sum(bool(row.get("passed")) for row in judged) / len(judged)
    most, one = (_together(found.get("batches", ()), count) for count in (scale.batches[-1], scale.batches[0]))
    warm = {name: of(name, "warm_ratio") for name in ("parallel_encoding", "context_experts")}
    return [
        _ask("share of exactness checks that pass = 1", right, lambda value: value == 1.0),
        _ask("idle first token / stock <= 1.02", of("idle", "cold_ratio"), lambda value: value <= 1.02),
        _ask("idle tokens per second / stock >= 0.98", of("idle", "decode_ratio"), lambda value: value >= 0.98),
        _ask("cold parallel_encoding / stock < 1", of("parallel_encoding", "cold_ratio"), lambda value: value < 1),
        _ask("cold context_experts / stock < 1", of("context_experts", "cold_ratio"), lambda value: value < 1),
        *(
            _ask(f"warm first token of {name}: stock / warm >= 20", None if value is None else 1 / value, _at_least_20)
            for name, value in warm.items()
        ),
        _ask(
            "cold sorted_inter_document / stock <= 1.2",
            of("sorted_inter_document", "cold_ratio"),
            lambda value: value <= 1.2,
        ),
        _ask("cold inter_document / stock <= 1.5", of("inter_document", "cold_ratio"), lambda value: value <= 1.5),
        _ask("decode of none / stock >= 1", of("none", "decode_ratio"), lambda value: value >= 1),
        _ask(
            "decode of parallel_encoding / stock >= 1",
            of("parallel_encoding", "decode_ratio"),
            lambda value: value >= 1,
        ),
        _ask(
            f"{scale.batches[-1]} requests / one request >= 12",
            None if most is None or one is None else most / one,
            lambda value: value >= 12,
        ),
    ]


def _at_least_20(value: float) -> bool:
    return value >= 20


def _ask(text: str, value: float | None, enough: Callable[[float], bool]) -> Ask:
    return Ask(text, value, None if value is None else enough(value))


def _value(rows: Sequence[Row], labels: Mapping[str, Any], name: str) -> float | None:
    """Return a number of the row with these labels."""
    for row in rows:
        if all(row.get(key) == value for key, value in labels.items()) and row.get(name) is not None:
            return float(row[name])
    return None


def _together(rows: Sequence[Row], count: int) -> float | None:
    return _value(rows, {"method": "none", "requests": count}, "tokens_per_s")
