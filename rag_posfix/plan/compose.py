"""Lays one plan over another where they change different things, and refuses where they do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rag_posfix.errors import PlanConflictError
from rag_posfix.plan.plan import Plan, RowPlan

EITHER = ("independent_passages", "score_question")
"""Fields of a plan that hold if one of the two says so."""

CLASHES = (
    # An attention of its own computes neither another method's mask nor its scaled channel.
    ("attend", "mask"),
    ("attend", "hidden_scale"),
    # Positions are those of the passages' places: other passages, other places.
    ("passages", "positions"),
)


def compose(plans: Sequence[tuple[str, Plan]]) -> Plan:
    """Return the plan that does what all of ``plans`` do; names are those of the methods, for the error.

    A plan with several rows gives each of them what the others ask of their one row.

    Raises:
        PlanConflictError: two methods set the same field, or fields that cannot be told apart in one attention.
    """
    (names, result), *rest = plans
    for name, plan in rest:
        result = _two(names, result, name, plan)
        names = f"{names} + {name}"
    return result


def _two(left: str, first: Plan, right: str, second: Plan) -> Plan:
    if len(first.rows) > 1 and len(second.rows) > 1:
        raise _conflict(left, right, "rows", "both read several rows")
    changes: dict[str, Any] = {
        "rows": tuple(_row(left, a, right, b) for a in first.rows for b in second.rows),
    }
    for field in dataclasses.fields(Plan):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if field.name in EITHER:
            changes[field.name] = a or b
        elif field.name != "rows":
            changes[field.name] = _one(left, a, right, b, field.name)
    for alone, other, owner, beside in ((first, second, left, right), (second, first, right, left)):
        if alone.calibration is not None and any(_changes(row) for row in other.rows):
            raise _conflict(owner, beside, "calibration", "what is run is decided after it, by one method alone")
        if alone.blend is not None and any(_changes(row) for row in other.rows):
            raise _conflict(owner, beside, "blend", "it puts together what the unmodified model reads")
        if alone.independent_passages and any(row.attend is not None for row in other.rows):
            raise _conflict(owner, beside, "attend", "passages that are read alone cannot attend in another way")
    return Plan(**changes)


_EDITS = tuple(field.name for field in dataclasses.fields(RowPlan) if field.name != "reusable")
"""What a row does differently. What one method alone could use again, it cannot beside another."""


def _row(left: str, first: RowPlan, right: str, second: RowPlan) -> RowPlan:
    for one, two in CLASHES:
        for a, b in ((one, two), (two, one)):
            if getattr(first, a) is not None and getattr(second, b) is not None:
                raise _conflict(left, right, a if a == b else f"{a} and {b}", "one computes without the other")
    return RowPlan(**{n: _one(left, getattr(first, n), right, getattr(second, n), n) for n in _EDITS})


def _one(left: str, a: Any, right: str, b: Any, field: str) -> Any:
    if a is not None and b is not None:
        raise _conflict(left, right, field, "both set it")
    return b if a is None else a


def _changes(row: RowPlan) -> bool:
    """Return whether a row differs from reading the prompt unmodified."""
    return any(getattr(row, name) is not None for name in _EDITS)


def _conflict(left: str, right: str, field: str, why: str) -> PlanConflictError:
    return PlanConflictError(
        f"{left} and {right} cannot be stacked: {field} ({why}); stack methods that change different things"
    )
