"""Stack: several mitigations at once, if their plans change different fields."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rag_posfix.contracts.method_spec import MethodSpec, split_outside
from rag_posfix.errors import ConfigError, PlanConflictError
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation, create
from rag_posfix.parameters import shown
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Capability, ModelShape, Plan, RowPlan

EITHER = ("independent_passages", "score_question", "tracks_sentence", "fits_windows")
"""Fields of a plan that are true if either plan sets them."""

CLASHES = (
    # A method's own attention applies neither another method's mask nor its scaled channel.
    ("attend", "mask"),
    ("attend", "hidden_scale"),
    # Positions belong to the passages of a row; a row of other passages needs other positions.
    ("passages", "positions"),
)


def compose(plans: Sequence[tuple[str, Plan]]) -> Plan:
    """Return one plan with the changes of all ``plans``, each with the name of its method for the error.

    Each row of a plan with several rows gets the changes of the single rows of the other plans.

    Raises:
        PlanConflictError: two methods set the same field, or fields that one attention cannot combine.
    """
    (names, result), *remaining = plans
    for name, plan in remaining:
        result = _merge_plans(names, result, name, plan)
        names = f"{names} + {name}"
    return result


def _merge_plans(left: str, first: Plan, right: str, second: Plan) -> Plan:
    if len(first.rows) > 1 and len(second.rows) > 1:
        raise _conflict(left, right, "rows", "both read several rows")
    changes: dict[str, Any] = {
        "rows": tuple(_merge_rows(left, a, right, b) for a in first.rows for b in second.rows),
    }
    for field in dataclasses.fields(Plan):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if field.name in EITHER:
            changes[field.name] = a or b
        elif field.name != "rows":
            changes[field.name] = _merge_field(left, a, right, b, field.name)
    for plan, other, name, other_name in ((first, second, left, right), (second, first, right, left)):
        if plan.calibration is not None and any(_changes(row) for row in other.rows):
            raise _conflict(name, other_name, "calibration", "it decides the rows, and another method changes them")
        if plan.blend is not None and any(_changes(row) for row in other.rows):
            raise _conflict(name, other_name, "blend", "it builds the KV cache of the unmodified model")
        if plan.independent_passages and any(row.attend is not None for row in other.rows):
            raise _conflict(name, other_name, "attend", "passages that are read alone cannot attend in another way")
    return Plan(**changes)


_EDITS = tuple(field.name for field in dataclasses.fields(RowPlan) if field.name != "reusable")
"""Fields that change a row. ``reusable`` is not merged: a prefix that one method may reuse is invalid with another."""


def _merge_rows(left: str, first: RowPlan, right: str, second: RowPlan) -> RowPlan:
    for field, other in CLASHES:
        for a, b in ((field, other), (other, field)):
            if getattr(first, a) is not None and getattr(second, b) is not None:
                raise _conflict(left, right, a if a == b else f"{a} and {b}", "one computes without the other")
    return RowPlan(**{n: _merge_field(left, getattr(first, n), right, getattr(second, n), n) for n in _EDITS})


def _merge_field(left: str, a: Any, right: str, b: Any, field: str) -> Any:
    if a is not None and b is not None:
        raise _conflict(left, right, field, "both set it")
    return b if a is None else a


def _changes(row: RowPlan) -> bool:
    """Return whether a row differs from the unmodified row."""
    return any(getattr(row, name) is not None for name in _EDITS)


def _conflict(left: str, right: str, field: str, why: str) -> PlanConflictError:
    return PlanConflictError(
        f"{left} and {right} cannot be stacked: {field} ({why}); stack methods that change different things"
    )


MAX_METHODS = 16


@MITIGATIONS.register("stack")
@dataclass(frozen=True)
class Stack(Mitigation):
    """Combine several methods, for example head scaling and sorted passages.

    Methods can be combined if they change different fields of a plan (positions per layer, positions per head, the
    RoPE base, the mask, the rows). Methods that change the same field are refused with both names.

    Source: this library; each method has its own.
    Formula: the union of the plans' fields; a plan with several rows gives each row the fields of the other plans.
    Differs from the paper: no paper combines them.
    Helps: where two methods correct different causes: an order-invariant method whose far positions are also brought
        nearer.
    Hurts: every method differs from the training of the model; two methods may differ too much.
    Cost: that of the methods together. Passages cannot be encoded once and reused if the stack contains a method that
        the whole prompt decides (head_scaling).
    Limits: those of each method. Conflicts are found when a prompt is planned.

    Args:
        methods: Names, or JSON objects ``{"name": ..., parameter: value}``; at least one.
    """

    name = "stack"
    order_invariant = True
    identity_parameters = MappingProxyType({"methods": ["none"]})
    neutral_is_identity = True
    uses_last_prompt_token = True
    compares_kv_heads = True
    nested_methods = "methods"

    methods: tuple[Any, ...] = ("head_scaling", "sorted_inter_document")

    def __post_init__(self) -> None:
        super().__post_init__()
        methods = self.methods
        if isinstance(methods, str) or not isinstance(methods, list | tuple) or not 1 <= len(methods) <= MAX_METHODS:
            raise ConfigError(
                f"stack: methods={shown(methods)} must be a list of 1 to {MAX_METHODS} methods, for example "
                'methods=["head_scaling","sorted_inter_document"]'
            )
        object.__setattr__(self, "methods", tuple(_canonical_json(method) for method in methods))
        for text in self.methods:
            _create_method(text)

    @property
    def is_order_invariant(self) -> bool:
        """Whether any of the methods is order-invariant: it sorts the passages for the other methods."""
        return any(method.is_order_invariant for method in map(_create_method, self.methods))

    def needs(self) -> frozenset[Capability]:
        """Return the capabilities that any of the methods needs."""
        return frozenset().union(*(method.needs() for method in map(_create_method, self.methods)))

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return the composed plan.

        Raises:
            PlanConflictError: two methods change the same field.
        """
        return compose([(method.name, method.plan(layout, model)) for method in map(_create_method, self.methods)])


def _create_method(text: str) -> Mitigation:
    """Return a method of the stack from its canonical JSON."""
    parameters = dict(json.loads(text))
    return create(parameters.pop("name"), parameters)


def _canonical_json(method: Any) -> str:
    """Return a method of the stack as canonical JSON: frozen, comparable, and part of the fingerprint."""
    fields = _parse_fields(method)
    if not isinstance(fields, Mapping) or not isinstance(fields.get("name"), str):
        raise ConfigError(f'stack: {shown(method)} must be a name, or {{"name": ..., parameter: value}}')
    name, parameters = MITIGATIONS.expand(
        MethodSpec(fields["name"], {key: value for key, value in fields.items() if key != "name"})
    )
    if name == Stack.name:
        raise ConfigError("stack: a stack cannot hold a stack; list its methods instead")
    try:
        return json.dumps({"name": name, **parameters}, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"stack: {shown(method)} holds values that JSON does not have; give numbers, text, lists"
        ) from error


def _parse_fields(method: Any) -> Any:
    """Return a method as a mapping, from its name, a mapping, or the JSON text of a mapping."""
    if not isinstance(method, str):
        return method
    if not method.startswith("{"):
        return {"name": method}
    split_outside(method, ":")  # bounds length and depth
    try:
        return json.loads(method)
    except ValueError as error:
        raise ConfigError(f'stack: {shown(method)} is no JSON; write {{"name": ..., "parameter": value}}') from error
